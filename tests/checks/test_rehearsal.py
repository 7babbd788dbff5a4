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
from torch.optim import SGD, AdamW, Optimizer

from accel_trainer import (
    Callback,
    CheckpointError,
    OptimizerConfig,
    RunResult,
    StepBatch,
    StepOutput,
    Trainer,
)
from accel_trainer.core.types import Batch, StepReport
from accel_trainer.training.callback import TrainerView

from .. import processes
from ..checkpoint.test_unsaved_state import Cached, Counting, Lookahead
from ..training.planted import Net, PlainTask, make_config, train, vectors

GLOBAL_STEPS = 0


# --- parts that a checkpoint cannot hold ---


class DictState(Net):
    """Its extra state is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


class ExpandedBuffer(Net):
    """A buffer that is one number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(3))


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


def of(optimizer: Callable[[Any], Any]) -> dict[str, Any]:
    return {"optimizer": lambda model: optimizer(model.parameters())}


def run(
    folder: Path, *, max_steps: int = 3, settings: OptimizerConfig | None = None, **parts: Any
) -> RunResult:
    config = make_config(folder, max_steps=max_steps)
    default = OptimizerConfig() if {"optimizer", "schedule"} & {*parts} else config.optimizer
    return train(replace(config, optimizer=settings or default), **parts)


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
        (
            replace_bias,
            "replaced the parameter linear.bias, and the optimizer still updates the old one",
        ),
        (
            add_buffer,
            r"changed centre of the model from nothing to float32 \[3\], "
            r"which a new model could not load",
        ),
    ],
)
def test_a_callback_that_replaces_tensors_ends_the_run_at_the_next_save(
    tmp_path: Path, change: Callable[[Any], None], fact: str
) -> None:
    with pytest.raises(CheckpointError, match=fact):
        run(tmp_path / "run", max_steps=6, callbacks=(AfterStep(4, change),))
    last = max(path.name for path in tmp_path.glob("run/checkpoints/step-*"))
    assert last.startswith("step-0000000003"), (
        "none is written of a model that the optimizer does not train"
    )


# --- state that no checkpoint holds ---


class CountingNet(Net):
    """Its rate of dropout grows with a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) / self.calls


class ClassCounter(Net):
    """Counts in its class."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        ClassCounter.calls += self.training
        return super().forward(inputs) / ClassCounter.calls


class GlobalCounter(Net):
    """Counts in a global."""

    def forward(self, inputs: Tensor) -> Tensor:
        global GLOBAL_STEPS
        GLOBAL_STEPS += self.training
        return super().forward(inputs) / GLOBAL_STEPS


class Centred(PlainTask):
    """Subtracts a running mean that is the task's."""

    def __init__(self) -> None:
        self.centre = torch.zeros(3)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return StepOutput((logits - self.centre).logsumexp(1))


class Taught(PlainTask):
    """Has a teacher that follows the model."""

    def __init__(self) -> None:
        self.teacher = Net()

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(theirs, 0.1)
        return super().step(model, batch)


class LateTeacher(PlainTask):
    """Creates its teacher when it is first needed, with random weights."""

    teacher: nn.Module | None = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if self.teacher is None:
            self.teacher = Net()
        return super().step(model, batch)


class OwnGenerator(PlainTask):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        noise = torch.randn(batch.inputs.shape, generator=self.generator)
        return super().step(model, Batch(batch.inputs + noise, batch.targets, batch.sample_ids))


class NumpyGenerator(PlainTask):
    """Draws from a generator of its own, numpy's."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        noise = float(self.generator.normal())
        return super().step(model, Batch(batch.inputs + noise, batch.targets, batch.sample_ids))


class WarmTrainer(Trainer):
    """Its steps count in an attribute that no checkpoint has."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_warm = 0
        self.num_logged = 0

    def train_step(self, step_batch: StepBatch) -> StepReport:
        self.num_warm += 1
        self.num_logged += 1
        return super().train_step(step_batch)


class LoggingTrainer(WarmTrainer):
    unsaved_attributes = ("num_logged",)


class HiddenCounter(SGD):
    """Its rate depends on a counter that no state dict has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.k = 0

    def step(self, closure: Any = None) -> None:
        self.k += 1
        super().step()


class InnerMomentum(SGD):
    """Leaves the update to another optimizer, whose state is in no state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = AdamW(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


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


class Plateau(Callback):
    """Keeps the lowest loss, and stores nothing."""

    def __init__(self) -> None:
        self.lowest = 100.0

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        self.lowest -= 1


class StoredPlateau(Plateau):
    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest = state["lowest"]


class Decaying:
    """A learning rate that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.1 / self.calls


def decaying_by_a_global(step: int) -> float:
    global GLOBAL_STEPS
    GLOBAL_STEPS += 1
    return 0.1


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "attribute": ({"model": CountingNet}, "model.calls"),
    "class attribute": ({"model": ClassCounter}, "ClassCounter.calls"),
    "global": ({"model": GlobalCounter}, f"{__name__}.GLOBAL_STEPS"),
    "task": ({"task": Centred}, "task.centre"),
    "teacher": ({"task": Taught}, "task.teacher.linear.bias"),
    "late teacher": ({"task": LateTeacher}, "the first step creates task.teacher.linear.bias"),
    "own generator": ({"task": OwnGenerator}, "task.generator"),
    "generator of numpy": ({"task": NumpyGenerator}, "task.generator"),
    "optimizer attribute": (of(HiddenCounter), "optimizer.k"),
    "optimizer inside": (of(InnerMomentum), "optimizer.inner.state"),
    "trainer": ({"trainer_class": WarmTrainer}, "trainer.num_logged, trainer.num_warm,"),
    "trainer with a log": ({"trainer_class": LoggingTrainer}, "changes trainer.num_warm,"),
    "callback": ({"callbacks": (Plateau(), StoredPlateau())}, "training changes Plateau.lowest,"),
    "schedule": ({"schedule": Decaying()}, "schedule.calls"),
    "global of a function": ({"schedule": decaying_by_a_global}, f"{__name__}.GLOBAL_STEPS"),
}


@pytest.mark.parametrize("name", NAMED)
def test_state_that_no_checkpoint_holds_is_named_in_one_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts, named = NAMED[name]
    assert run(tmp_path / "run", **parts).state == "done"
    (line,) = [
        record.getMessage() for record in caplog.records if "UNSAVED_STATE" in record.getMessage()
    ]
    assert named in line


class Logged(CountingNet):
    """Counts for a log, in its own attribute and in its class's, and says so."""

    unsaved_attributes = ("calls", "total")
    total = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        Logged.total += self.training
        return Net.forward(self, inputs)


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


class Caches(Net):
    """Sets up what it needs in the first forward, and keeps what it last saw."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None
        self.is_ready = False
        self.length = 0
        self.last: Any = None
        self.auxiliary: Any = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_ready:
            self.table = torch.arange(6.0)
            self.is_ready = True
            self.length = 6
        self.last = inputs.detach()
        outputs = super().forward(inputs + self.table / self.length)
        self.auxiliary = outputs.mean()
        return outputs


class StoredCounter(Net):
    """Counts, and says so in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) / (1 + self.calls)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class GrowingExtraState(StoredCounter):
    """Its extra state has another shape after each step."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = len(state)


class CachedNet(Cached):
    """As `Cached`, for vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.before(inputs))


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        wrap(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    )


class Recurrent(nn.Module):
    """An LSTM over the numbers of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs[..., None])[0][:, -1])


class Tied(nn.Module):
    """Encoder and decoder share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs)))


class Assigned(Net):
    """Assigns its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return outputs - self.centre


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(6, 3)
    )


class Adversarial(PlainTask):
    """A frozen critic beside the loss."""

    def __init__(self) -> None:
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).requires_grad_(
            False
        )
        self.last_score: Any = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.last_score = self.critic(model(batch.inputs)).squeeze(1)
        return StepOutput(self.last_score)


class Reverse(torch.autograd.Function):
    """The identity, with a negated gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Gan(nn.Module):
    """A generator of vectors and a critic, both trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(inputs), 2))
        return self.critic(inputs) - self.critic(Reverse.apply(made))


class OfTransformers(nn.Module):
    """A small transformers model with random weights and dropout, over the signs of six numbers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        sizes = {
            "vocab_size": 2,
            "max_position_embeddings": 6,
            "dim": 8,
            "hidden_dim": 16,
            "n_layers": 1,
            "n_heads": 2,
        }
        self.net = DistilBertForSequenceClassification(DistilBertConfig(**sizes, num_labels=3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(input_ids=(inputs > 0).long()).logits


class Wrapper(Optimizer):
    """Steps another optimizer, as wrappers do that do not call `Optimizer.__init__`."""

    def __init__(self, parameters: Any) -> None:
        self.wrapped = SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups = self.wrapped.param_groups
        self.state = self.wrapped.state
        self.defaults = {}

    def step(self, closure: Any = None) -> None:
        self.wrapped.step()

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state)
        self.param_groups = self.wrapped.param_groups
        self.state = self.wrapped.state


class Logging(AdamW):
    """Keeps the norm of the last step, and has defaults of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.last_norm: Any = None

    def step(self, closure: Any = None) -> None:
        self.last_norm = self.param_groups[0]["params"][0].grad.norm()
        super().step()


norms = nn.utils.parametrizations
HONEST: dict[str, dict[str, Any]] = {
    "plain": {},
    "caches": {"model": Caches},
    "counter in the extra state": {"model": StoredCounter},
    "growing extra state": {"model": GrowingExtraState},
    "non-persistent buffers": {"model": CachedNet},
    "assigned buffer": {"model": Assigned},
    "expanded buffer": {"model": ExpandedBuffer},
    "spectral norm": {"model": wrapped(norms.spectral_norm)},
    "weight norm": {"model": wrapped(norms.weight_norm)},
    "orthogonal": {"model": wrapped(norms.orthogonal)},
    "old spectral norm": {"model": wrapped(nn.utils.spectral_norm)},
    "recurrent": {"model": Recurrent},
    "tied": {"model": Tied},
    "transformer": {"model": transformer},
    "of transformers": {"model": OfTransformers},
    "gan": {"model": Gan},
    "critic": {"task": Adversarial},
    "optimizer that counts": of(Counting),
    "lookahead": of(Lookahead),
    "optimizer that logs": of(Logging),
    "wrapper of an optimizer": of(Wrapper),
}
SHOWN = ["caches", "gan", "growing extra state", "old spectral norm", "optimizer that logs"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHOWN else [pytest.mark.slow]) for name in HONEST],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_nothing_is_said_of_honest_parts_and_they_resume_bit_for_bit(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_honest(tmp_path, caplog, **HONEST[name])


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
    check_honest(tmp_path, caplog, settings=OptimizerConfig(name=name))


def check_honest(folder: Path, caplog: pytest.LogCaptureFixture, **parts: Any) -> None:
    run(folder / "whole", max_steps=5, **parts)
    run(folder / "parts", max_steps=3, **parts)
    run(folder / "parts", max_steps=5, **parts)
    whole, resumed = (
        load_file(folder / name / "export" / "model.safetensors") for name in ("whole", "parts")
    )
    assert [
        record.getMessage() for record in caplog.records if "UNSAVED_STATE" in record.getMessage()
    ] == []
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_no_room_for_the_optimizers_state_ends_the_run_at_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 4 * (6 * 3 + 3)
    monkeypatch.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: 2 * weights + 1)
    needed = 2 * (3 * weights + 8)
    with pytest.raises(CheckpointError, match=rf"\({needed} bytes\).* has {2 * weights + 1} free"):
        run(tmp_path / "run", settings=OptimizerConfig(name="adamw"))
