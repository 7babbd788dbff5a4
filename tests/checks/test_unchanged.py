"""What user code that only looks at the model leaves changed in it is one error by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointError,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunConfig,
    RunResult,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.checkpoint.format import list_checkpoints

from ..variants import slow_but

Change = Callable[[nn.Module], object]


class Net(nn.Sequential):
    """A small net that its library can store."""

    on_store: Change = staticmethod(lambda model: None)

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 2))

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "net").touch()
        type(self).on_store(self)


def scale(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("3.weight").mul_(1.01)


def forget_row(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight")[-1] = 0


def permute(model: nn.Module) -> None:
    with torch.no_grad():
        weight = model.get_parameter("0.weight")
        weight.copy_(weight.roll(1, 0))


def average(model: nn.Module) -> None:
    model.load_state_dict({name: each * 0.9 for name, each in model.state_dict().items()})


def add_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, inputs, output: output * 0.9)


def replace_layer(model: nn.Module) -> None:
    assert isinstance(model, Net)
    model[2] = nn.Identity()


CHANGES: dict[str, tuple[Change, str]] = {
    "weights": (scale, "model.3.weight"),
    "the last row": (forget_row, "model.0.weight"),
    "rows in another order": (permute, "model.0.weight"),
    "all weights": (average, "model.0.bias"),
    "requires_grad": (lambda model: model.requires_grad_(False), "model.0.bias.requires_grad"),
    "hook": (add_hook, "model.hooks"),
    "module": (replace_layer, "model"),
    "dtype": (lambda model: model.half(), "model.0.bias"),
}


class Score:
    """An evaluation of one's own."""

    monitors = {"score": True}

    def __init__(self, change: Change) -> None:
        self.change = change

    def run(self, model: nn.Module, position: Any, stop_flag: object) -> dict[str, float]:
        self.change(model)
        return {"score": float(position.step)}


class Evaluates(ClassificationTask):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        found = super().step(model, batch)
        self.change(model)
        return found


class Update(MeanLoss):
    def __init__(self, change: Change, model: nn.Module) -> None:
        super().__init__()
        self.change = change
        self.of = model

    def update(self, sums: Tensor, batch: Any, output: Any) -> None:
        super().update(sums, batch, output)
        self.change(self.of)


class Compute(Update):
    update = MeanLoss.update

    def compute(self, sums: Tensor) -> Any:
        self.change(self.of)
        return super().compute(sums)


class Stored(Callback):
    def __init__(self, change: Change, model: nn.Module) -> None:
        self.change = change
        self.of = model

    def state_dict(self) -> dict[str, Any]:
        self.change(self.of)
        return {"value": 1}


class State(Stored):
    pass


def train(folder: Path, place: str, change: Change, **changes: Any) -> RunResult:
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = Net()
    model[0].bias.data.fill_(0.1)
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=16),
        trainer=TrainerConfig(num_epochs=2, **changes),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    parts: dict[str, Any] = {"task": ClassificationTask(), "eval_sets": data}
    parts |= {
        "run": {"eval_sets": Score(change)},
        "second run": {"eval_sets": {"val": data, "own": Score(change)}},
        "eval_step": {"task": Evaluates(change)},
        "update": {"metrics": [Update(change, model)]},
        "compute": {"metrics": [Compute(change, model)]},
        "a callback's state_dict": {"callbacks": [Stored(change, model)]},
        "a state's state_dict": {"states": {"mine": State(change, model)}},
    }.get(place, {})
    with start_run(config, recipe="changed") as run:
        return build_trainer(run, model=model, train_set=data, **parts).fit()


CASES = [(place, name) for place in ("run", "second run") for name in CHANGES]
# The first step does not work after the others, which are tried before it.
CASES += [
    (place, name)
    for place in ("eval_step", "update", "compute")
    for name in ("weights", "all weights", "hook", "module")
]


@pytest.mark.parametrize(
    ("place", "name"),
    slow_but(
        [
            ("run", "weights"),
            ("second run", "hook"),
            ("run", "requires_grad"),
            ("eval_step", "weights"),
            ("update", "all weights"),
            ("compute", "module"),
        ],
        CASES,
    ),
)
def test_what_an_evaluation_leaves_changed_is_one_error_by_name(
    tmp_path: Path, place: str, name: str
) -> None:
    change, changed = CHANGES[name]
    with pytest.raises(CheckpointError, match=f"the evaluation eval.* changes .*{changed}"):
        train(tmp_path, place, change)


def test_weights_that_an_evaluation_has_changed_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the evaluation eval changes"):
        train(tmp_path, "run", scale)
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_the_average_is_looked_at_too(tmp_path: Path) -> None:
    def scale_average(model: nn.Module) -> None:
        if model.training is False and not any(each.requires_grad for each in model.parameters()):
            scale(model)

    with pytest.raises(CheckpointError, match=r"eval_ema changes average_model\.3\.weight"):
        train(tmp_path, "run", scale_average, ema_decay=0.9)


@pytest.mark.parametrize("place", ["a callback's state_dict", "a state's state_dict"])
def test_a_state_dict_that_changes_weights_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointError, match=r"state_dict changes model\.3\.weight"):
        train(tmp_path, place, scale)


def test_a_save_pretrained_that_changes_the_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "on_store", staticmethod(add_hook))
    with caplog.at_level(logging.WARNING):
        train(tmp_path, "", lambda model: None)
    (message,) = [each for each in caplog.messages if "UNSAVED_STATE" in each]
    assert "PretrainedExport.on_fit_end changes model.hooks" in message


def swapped(model: nn.Module) -> None:
    """Measure other weights, and put the own ones back."""
    kept = copy.deepcopy(model.state_dict())
    average(model)
    model(torch.randn(4, 4))
    model.load_state_dict(kept)


def in_training_mode(model: nn.Module) -> None:
    model.train()
    model(torch.randn(4, 4))


def frozen_for_a_while(model: nn.Module) -> None:
    handle = model[0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    model.requires_grad_(False)
    model(torch.randn(4, 4))
    model.requires_grad_(True)
    handle.remove()


@pytest.mark.parametrize("change", [swapped, in_training_mode, frozen_for_a_while])
@pytest.mark.parametrize("place", ["run", "eval_step"])
def test_what_an_evaluation_puts_back_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, change: Change
) -> None:
    plain = train(tmp_path / "plain", place, lambda model: None)
    changed = train(tmp_path / "changed", place, change)
    assert changed.metrics.keys() == plain.metrics.keys()
    assert [each for each in caplog.messages if "UNSAVED" in each] == []
    rows = [
        [row.get("train/loss") for row in result.history if row["event"] == "train"]
        for result in (plain, changed)
    ]
    assert rows[0] == rows[1]
