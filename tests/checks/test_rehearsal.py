"""State that a checkpoint does not hold is named after the first steps; honest parts pass."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from accel_trainer import (
    Callback,
    CheckpointError,
    OptimizerConfig,
    StepOutput,
)
from accel_trainer.core.types import Batch
from accel_trainer.training.callback import TrainerView

from .. import processes
from ..checkpoint.test_unsaved_state import Counting
from ..training.planted import Net, PlainTask, make_config, run, train, vectors
from ..variants import slow_but
from .honest import HONEST, of

# --- parts that a checkpoint cannot hold ---


class DictState(Net):
    """Its extra state is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


class LateBuffer(Net):
    """A buffer that appears with the first forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "centre"):
            self.register_buffer("centre", inputs.mean(0))
        return super().forward(inputs - self.centre)


class NewParameter(Net):
    """Replaces its weights, which the optimizer does not notice."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.linear.bias = nn.Parameter(self.linear.bias.detach() * 0.9)
        return super().forward(inputs)


class Queued(SGD):
    """Keeps its last norms in a deque, which is no plain value."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                norms = self.state[parameter].setdefault("norms", collections.deque(maxlen=3))
                norms.append(float(parameter.grad.norm()))
        super().step()


class NumpyNumber(SGD):
    """Keeps a number of numpy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["norm"] = np.float64(1.0)


class ForgetfulCounter(Counting):
    """Stores its counter, and does not take it back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        SGD.load_state_dict(self, {name: state[name] for name in ("state", "param_groups")})


class KeyedByAddress(SGD):
    """Its state dict has a parameter's address as a key."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow: dict[int, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        super().step()
        self.slow = {
            id(p): p.detach().clone() for group in self.param_groups for p in group["params"]
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.slow = dict(state["slow"])


class CannotLoad(SGD):
    """Wants more than it gave."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(
            {**state, "state": state["fast_state"]} if state["state"] else state
        )


class DequeCallback(Callback):
    """Its state is no plain value once a step is done."""

    def __init__(self) -> None:
        self.last: Any = None

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.last = collections.deque([report.optimizer_step])

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "extra state": (
        {"model": DictState},
        "_extra_state of the model is an object of type dict with scale: return a tensor from ",
    ),
    "late buffer": (
        {"model": LateBuffer},
        r"changed centre of the model from nothing to float32 \[6\]",
    ),
    "new parameter": ({"model": NewParameter}, "training replaced the parameter linear.bias"),
    "deque": (of(Queued), r"optimizer.state.linear.\w+.norms is a collections.deque"),
    "numpy number": (of(NumpyNumber), r"optimizer.param_groups\[0\].norm is a numpy.float64"),
    "not restored": (
        of(ForgetfulCounter),
        "ForgetfulCounter.load_state_dict does not restore the optimizer's k:",
    ),
    "address": (of(KeyedByAddress), "the address of a parameter"),
    "cannot load": (
        of(CannotLoad),
        "CannotLoad.load_state_dict cannot load what .* returned .KeyError: 'fast_state'.",
    ),
    "callback": (
        {"callbacks": (DequeCallback(),)},
        "trainer.callbacks.DequeCallback.last is a collections.deque",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_a_resume_would_lose_ends_the_run_with_its_first_step(
    tmp_path: Path, name: str
) -> None:
    """Fault (Resume): part of the state is not restored, because the state of your own optimizer,
    model or callback cannot be stored, loaded or restored -> the run ends at its first step,
    with one line that names the object
    """
    parts, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path / "run", **parts)
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def assign(trainer: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(weights, assign=True)


def replace_bias(trainer: Any) -> None:
    trainer.model.linear.bias = nn.Parameter(torch.zeros(3))


def add_buffer(trainer: Any) -> None:
    trainer.model.register_buffer("centre", torch.zeros(3))


class AfterStep(Callback):
    """Does something to the model after one step."""

    def __init__(self, step: int, change: Callable[[Any], None]) -> None:
        self.step = step
        self.change = change

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == self.step:
            self.change(trainer)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (assign, "replaced the parameter linear.bias, and the optimizer still updates the old one"),
        (replace_bias, "replaced the parameter linear.bias, and the optimizer still updates"),
        (add_buffer, r"changed centre of the model from nothing to float32 \[3\], which a new"),
    ],
)
def test_a_callback_that_replaces_tensors_ends_the_run_at_the_next_save(
    tmp_path: Path, change: Callable[[Any], None], fact: str
) -> None:
    """Fault (Resume): user code replaces a parameter after the first steps
    (`load_state_dict(assign=True)`), or adds, removes or resizes a tensor of the model -> the
    run ends at the next save, with one line that names the tensor; earlier checkpoints are kept
    """
    with pytest.raises(CheckpointError, match=fact):
        run(tmp_path / "run", max_steps=6, callbacks=(AfterStep(4, change),))
    last = max(path.name for path in tmp_path.glob("run/checkpoints/step-*"))
    assert last.startswith("step-0000000003"), (
        "none is written of a model that the optimizer does not train"
    )


# --- state that no checkpoint holds, beside what test_hidden_state.py plants ---


class Margin(PlainTask):
    """Grows harder with each epoch, as a callback says."""

    margin = 0.0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses + self.margin)


class Noisy:
    """Vectors with noise, of which a callback may say how much."""

    noise = 0.0

    def __init__(self, num: int) -> None:
        self.vectors = vectors(num)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.vectors[index]
        return inputs + self.noise * torch.randn(6), target


class AtEpochEnd(Callback):
    """Changes something as a curriculum does, first after the third epoch."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self._change = change

    def on_epoch_end(self, trainer: TrainerView) -> None:
        if trainer.state.epoch >= 3:
            self._change()


@pytest.mark.parametrize(
    "name", ["task.margin", "train_set.noise", "model.1.p", "model.0.requires_grad"]
)
def test_state_that_the_end_of_an_epoch_changes_is_named_once(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    task, data, dropout, frozen = Margin(), Noisy(32), nn.Dropout(0.1), nn.Linear(6, 6)
    changes: dict[str, Callable[[], Any]] = {
        "task.margin": lambda: setattr(task, "margin", task.margin + 0.1),
        "train_set.noise": lambda: setattr(data, "noise", data.noise + 0.1),
        "model.1.p": lambda: setattr(dropout, "p", dropout.p + 0.1),
        "model.0.requires_grad": lambda: frozen.requires_grad_(True),
    }
    config = make_config(tmp_path / "run", max_steps=None)
    result = train(
        replace(config, trainer=replace(config.trainer, num_epochs=5)),
        model=lambda: nn.Sequential(frozen.requires_grad_(False), dropout, nn.Linear(6, 3)),
        task=lambda: task,
        data=lambda num: data if num == 32 else vectors(num),
        callbacks=(AtEpochEnd(changes[name]),),
    )
    assert result.position.epoch == 5
    (line,) = [line for line in caplog.messages if "UNSAVED_STATE" in line]
    assert line.startswith(f"[UNSAVED_STATE] the end of an epoch changes {name}, and no ")


class Logged(Net):
    """Counts for a log, in its own attribute and in its class's, and says so."""

    unsaved_attributes = ("calls", "total")
    total = calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        Logged.total += self.training
        return super().forward(inputs)


@pytest.mark.parametrize("confirmed", [True, False])
def test_state_that_its_class_lists_in_unsaved_attributes_is_not_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    confirmed: bool,
) -> None:
    if not confirmed:
        monkeypatch.setattr(Logged, "unsaved_attributes", ())
    run(tmp_path / "run", model=Logged)
    lines = [
        record.getMessage() for record in caplog.records if "UNSAVED_STATE" in record.getMessage()
    ]
    assert len(lines) == (not confirmed)
    assert confirmed or "training changes Logged.total, model.calls" in lines[0]


class OwnCentre(Net):
    """Moves a frozen parameter by the samples of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.centre.data.lerp_(inputs.mean(0), 0.1)
        return super().forward(inputs - self.centre)


class Langevin(SGD):
    """Adds noise of a generator that differs between processes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            own = torch.Generator().manual_seed(torch.distributed.get_rank())
            parameter.add_(torch.randn(parameter.shape, generator=own), alpha=0.01)


def check_processes_differ(folder: Path) -> None:
    for name, parts, said in (
        ("model", {"model": OwnCentre}, "centre"),
        ("optimizer", of(lambda parameters: Langevin(parameters, lr=0.1)), "linear.weight"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"processes differ after a step \(process 1: model\.{said}"
        ):
            run(folder / name, **parts)


def test_a_parameter_that_differs_by_process_ends_the_run(tmp_path: Path) -> None:
    processes.run(check_processes_differ, tmp_path, num_processes=2, folder=tmp_path / "logs")


# --- honest parts ---


SHOWN = ["gan", "growing extra state", "old spectral norm", "sets up late", "takes turns"]


@pytest.mark.parametrize("name", slow_but(SHOWN, HONEST))
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_nothing_is_said_of_honest_parts_and_they_resume_bit_for_bit(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_honest(tmp_path, caplog, HONEST[name])


LIBRARY = """
from torch import nn

COUNTS = [0]

class LibraryNet(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.calls = 0

    def forward(self, inputs):
        COUNTS[0] += 1
        self.calls += 1
        return super().forward(inputs)
"""


def test_libraries_of_another_environment_are_not_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "system" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "library_elsewhere.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    assert (
        run(tmp_path / "run", model=import_module("library_elsewhere").LibraryNet).state == "done"
    )
    assert [
        record.getMessage() for record in caplog.records if "UNSAVED_STATE" in record.getMessage()
    ] == []


NAMES = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_said_of_the_optimizers_of_torch(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_honest(tmp_path, caplog, lambda: {"settings": OptimizerConfig(name=name)})


def check_honest(
    folder: Path, caplog: pytest.LogCaptureFixture, parts: Callable[[], dict[str, Any]]
) -> None:
    run(folder / "whole", max_steps=5, **parts())
    run(folder / "parts", max_steps=3, **parts())
    run(folder / "parts", max_steps=5, **parts())
    whole, resumed = (
        load_file(folder / name / "export" / "model.safetensors") for name in ("whole", "parts")
    )
    assert [line for line in caplog.messages if line.startswith("[")] == []
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_no_room_for_the_optimizers_state_ends_the_run_at_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 4 * (6 * 3 + 3)
    monkeypatch.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: 2 * weights + 1)
    needed = 2 * (3 * weights + 8)
    with pytest.raises(CheckpointError, match=rf"\({needed} bytes\).* has {2 * weights + 1} free"):
        run(tmp_path / "run", settings=OptimizerConfig(name="adamw"))
