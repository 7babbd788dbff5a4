from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.checkpoint.state_dict import UnlistedBuffers, check_weights, training_state
from accel_trainer.core.errors import CheckpointError, ExitCode
from accel_trainer.core.registry import Registry
from accel_trainer.optim.config import OptimizerConfig
from accel_trainer.optim.ema import Ema
from accel_trainer.optim.optimizers import build_optimizer

from ..workload import SmallNet

Change = Callable[[dict[str, Any]], object]


@dataclass
class Trained:
    """What was trained, and the registry of its state."""

    model: nn.Module
    optimizer: Optimizer
    state: Registry

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, pieces: dict[str, Any]) -> None:
        self.state.load_state_dict(pieces)

    def started_anew(self) -> Trained:
        return Trained(self.model, self.optimizer, training_state(self.model, {"": self.optimizer}))


def trained(seed: int, *, name: str = "sgd") -> Trained:
    """A run after two steps, everything in it different for each `seed`."""
    torch.manual_seed(seed)
    model = SmallNet(norm="batch")
    optimizer = build_optimizer(model, OptimizerConfig(name=name, learning_rate=0.1))
    ema = Ema(model, copy.deepcopy(model), decay=0.9, optimizers={})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 3))
    scaler.scale(torch.ones(()))
    for step in (1, 2):
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update({"": step})
    return Trained(model, optimizer, training_state(model, {"": optimizer}, ema, scaler))


def stored(state: Trained) -> dict[str, Any]:
    return copy.deepcopy(state.state_dict())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_restored_objects_have_the_state_that_was_taken(name: str) -> None:
    source, target = trained(0, name=name), trained(1, name=name)
    pieces = stored(source)
    assert not same(stored(target), pieces)
    target.load_state_dict(pieces)
    assert same(stored(target), pieces)


def test_optimizer_settings_are_of_the_run_and_state_of_the_checkpoint() -> None:
    source, target = trained(0), trained(1)
    for group in source.optimizer.param_groups:
        group["num_restarts"] = 7  # as an optimizer may count
    source = source.started_anew()
    for group in source.optimizer.param_groups:
        group["num_restarts"] = 9
    for group in target.optimizer.param_groups:
        group.update(num_restarts=7, weight_decay=0.5)
    target.started_anew().load_state_dict(stored(source))
    for group in target.optimizer.param_groups:
        assert (group["num_restarts"], group["weight_decay"]) == (9, 0.5)


def test_pieces_are_the_live_tensors() -> None:
    state = trained(0)
    pieces = state.state_dict()
    with torch.no_grad():
        state.model.layers[0].weight.zero_()
    assert pieces["model"]["layers.0.weight"].abs().sum() == 0


def test_restoring_shares_no_memory_with_what_was_restored() -> None:
    source, target = trained(0), trained(1)
    pieces = stored(source)
    before = copy.deepcopy(pieces)
    target.load_state_dict(pieces)
    target.model(torch.randn(4, 3, 8, 8)).sum().backward()
    target.optimizer.step()
    assert same(pieces, before)


def test_a_run_without_average_and_scaler_has_no_pieces_of_them() -> None:
    bare = trained(0).started_anew()
    assert sorted(bare.state_dict()) == ["model", "optimizer"]
    bare.load_state_dict(stored(trained(1)))  # what the checkpoint has besides is not needed


def test_the_optimizer_knows_its_class_and_the_names_of_its_parameters() -> None:
    piece = trained(0).state_dict()["optimizer"]
    assert piece["class"] == "SGD"
    names = [name for group in piece["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in SmallNet(norm="batch").named_parameters())


def drop(*path: Any) -> Change:
    def change(pieces: dict[str, Any]) -> None:
        for key in path[:-1]:
            pieces = pieces[key]
        del pieces[path[-1]]

    return change


def put(*path: Any, value: Any) -> Change:
    def change(pieces: dict[str, Any]) -> None:
        for key in path[:-1]:
            pieces = pieces[key]
        pieces[path[-1]] = value

    return change


GROUPS = ("optimizer", "param_groups")
MISFITS: dict[str, tuple[Change, str, str]] = {
    "no model": (drop("model"), "CKPT_MISSING", "the checkpoint has no model: start with"),
    "no optimizer": (drop("optimizer"), "CKPT_MISSING", "the checkpoint has no optimizer"),
    "no average": (drop("ema"), "CKPT_MISSING", "the checkpoint has no ema"),
    "no scaler": (drop("scaler"), "CKPT_MISSING", "the checkpoint has no scaler"),
    "a weight is missing": (
        drop("model", "layers.9.bias"),
        "CKPT_WEIGHTS",
        "the stored model does not fit: layers.9.bias is missing",
    ),
    "a weight more": (
        put("model", "head.bias", value=torch.zeros(4)),
        "CKPT_WEIGHTS",
        "head.bias is unknown here",
    ),
    "another shape": (
        put("model", "layers.9.bias", value=torch.zeros(10)),
        "CKPT_WEIGHTS",
        r"layers.9.bias is torch.float32 \[10\], here torch.float32 \[4\]",
    ),
    "another dtype": (
        put("model", "layers.9.bias", value=torch.zeros(4).half()),
        "CKPT_WEIGHTS",
        "layers.9.bias is torch.float16",
    ),
    "a shape of the average": (
        put("ema", "layers.9.bias", value=torch.zeros(10)),
        "CKPT_WEIGHTS",
        "the stored ema does not fit",
    ),
    "another optimizer": (
        put("optimizer", "class", value="AdamW"),
        "CKPT_OPTIMIZER",
        "the checkpoint's optimizer is AdamW, but this run uses SGD",
    ),
    "no class": (
        drop("optimizer", "class"),
        "CKPT_OPTIMIZER",
        "the checkpoint's optimizer is None",
    ),
    "a group is missing": (drop(*GROUPS, 1), "CKPT_OPTIMIZER", "has different parameters"),
    "a parameter is missing": (
        drop(*GROUPS, 0, "params", 0),
        "CKPT_OPTIMIZER",
        "has different parameters",
    ),
    "an option is missing": (
        drop(*GROUPS, 0, "nesterov"),
        "CKPT_OPTIMIZER",
        "has different parameters",
    ),
    "another name": (
        put(*GROUPS, 0, "params", 0, value="stem.weight"),
        "CKPT_OPTIMIZER",
        "has different parameters",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_in_one_line_and_nothing_has_changed(name: str) -> None:
    """Fault (Resume): different names or shapes of weights -> an error that lists the first five;
    nothing is changed
    """
    change, code, message = MISFITS[name]
    state, pieces = trained(0), stored(trained(1))
    before = stored(state)
    change(pieces)
    with pytest.raises(CheckpointError, match=message) as caught:
        state.load_state_dict(pieces)
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    assert "\n" not in str(caught.value)
    assert same(stored(state), before)


def test_a_checkpoint_of_another_optimizer_is_refused_with_the_way_out() -> None:
    """Fault (Resume): a different optimizer -> an error before anything is changed"""
    with pytest.raises(CheckpointError, match="optimizer is AdamW, but this run uses SGD: "):
        trained(0).load_state_dict(stored(trained(1, name="adamw")))


def test_many_differences_are_shown_as_five_and_a_count() -> None:
    mine = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)]).state_dict()
    with pytest.raises(CheckpointError, match="0.bias is missing; 0.weight is missing;") as caught:
        check_weights("model", mine, {})
    assert str(caught.value).count("is missing") == 5


def test_a_prefix_that_all_stored_names_share_is_said() -> None:
    mine = SmallNet(norm="group").state_dict()
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "net."):
        theirs = {f"{prefix}{name}": value for name, value in mine.items()}
        with pytest.raises(CheckpointError, match=f"all its names start with {prefix}, the"):
            check_weights("model", mine, theirs)
    others = (
        dict([*mine.items()][1:]),
        {"other": mine["layers.9.bias"]},
        {"other.weight": mine["layers.9.bias"], "other.bias": mine["layers.9.bias"]},
        {f"layers.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()},
    )
    for theirs in others:
        with pytest.raises(CheckpointError, match="use weights of this model"):
            check_weights("model", mine, theirs)


def test_an_unlisted_buffer_keeps_the_dtype_that_training_gave_it() -> None:
    """A cache that a forward has replaced by one in half precision."""

    def parts() -> tuple[nn.Module, UnlistedBuffers]:
        model = nn.Linear(2, 2)
        model.register_buffer("cache", torch.zeros(3), persistent=False)
        return model, UnlistedBuffers({"model": model})

    (model, buffers), (other, restored) = parts(), parts()
    model.cache = torch.ones(3, dtype=torch.float16)
    restored.load_state_dict(buffers.state_dict())
    assert torch.equal(other.cache, model.cache)
    assert other.cache.dtype == torch.float16
