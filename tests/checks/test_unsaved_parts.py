"""Parts whose resume would differ are named by an ordinary run, and honest parts are not.

Each case is a part of a user's own. Samples have their cases in `data/test_repeated_reads.py`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    CheckpointError,
    ClassificationTask,
    DatasetOptions,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    StepOutput,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.types import Batch

from ..training.planted import PlainTask, vectors


def make_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def train(
    folder: Path,
    *,
    model: Callable[[], nn.Module] = make_net,
    task: Callable[[], Any] = PlainTask,
    callbacks: Callable[[], list[Callback]] = list,
    data: Callable[[int], Any] = vectors,
    options: Callable[[], DatasetOptions] = DatasetOptions,
    **parts: Any,
) -> None:
    """Train four steps of four samples."""
    built = {"optimizer", "schedule"} & parts.keys()
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=4),
        trainer=TrainerConfig(num_epochs=1, max_steps=4),
        optimizer=OptimizerConfig() if built else OptimizerConfig(learning_rate=0.05),
        checkpoint=CheckpointConfig(every_n_steps=2),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="parts") as run:
        trainer = build_trainer(
            run,
            model=model(),
            task=task(),
            train_set=data(32),
            eval_sets=data(9),
            metrics=[MeanLoss()],
            callbacks=callbacks(),
            options=options(),
            **parts,
        )
        trainer.fit()


# --- callbacks ---


class At(Callback):
    """Does something to the model in a hook."""

    def __init__(self, change: Callable[[Any], Any], *, step: int | None = None) -> None:
        self._change = change
        self._step = step

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if self._step in (None, report.optimizer_step):
            self._change(trainer.model)


class EvalMode(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model.eval())


class EvalModeOfOne(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model[3].eval(), step=1)


class Freezes(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model[0].requires_grad_(False), step=1)


class AddsForwardHook(At):
    def __init__(self) -> None:
        super().__init__(
            lambda model: model[0].register_forward_hook(lambda module, inputs, out: out * 1.5),
            step=1,
        )


class AddsBackwardHook(At):
    def __init__(self) -> None:
        super().__init__(
            lambda model: model[2].register_full_backward_hook(lambda *_: None), step=2
        )


class AddsGradientHook(At):
    def __init__(self) -> None:
        super().__init__(
            lambda model: model[0].weight.register_hook(lambda gradient: gradient * 0.5), step=1
        )


class RemovesHook(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model[2]._forward_hooks.clear(), step=1)


class Swaps(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model.__setitem__(2, nn.GELU()), step=1)


class ReplacesForward(At):
    def __init__(self) -> None:
        super().__init__(lambda model: setattr(model[2], "forward", torch.tanh), step=1)


def halve(model: nn.Module) -> None:
    model.half().float()


class Halves(At):
    def __init__(self) -> None:
        super().__init__(halve)


class Decays(At):
    def __init__(self) -> None:
        super().__init__(lambda model: model[4].weight.data.mul_(0.99), step=2)


class AfterSave(Callback):
    """Changes weights that a checkpoint was already made of."""

    def on_checkpoint(self, trainer: Any, name: str) -> None:
        with torch.no_grad():
            trainer.model[0].bias.add_(0.1)


def frozen_norm() -> nn.Module:
    model = make_net()
    model[1].requires_grad_(False)
    model[2].register_forward_hook(lambda *_: None)
    return model


CALLBACKS: dict[type[Callback], str] = {
    EvalMode: "model.0.training",
    EvalModeOfOne: "model.3.training",
    Freezes: "model.0.bias.requires_grad",
    AddsForwardHook: "model.0.hooks",
    AddsBackwardHook: "model.2.hooks",
    AddsGradientHook: "model.0.weight",
    RemovesHook: "model.2.hooks",
    Swaps: "model.2",
    ReplacesForward: "model.2",
    Halves: "model.0.weight",
    Decays: "model.4.weight",
    AfterSave: "model.0.bias",
}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("[")]


def test_a_callback_that_changes_the_model_is_named_with_what_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, changed in CALLBACKS.items():
        caplog.clear()
        train(tmp_path / kind.__name__, model=frozen_norm, callbacks=lambda kind=kind: [kind()])
        lines = [line for line in lines_of(caplog) if kind.__name__ in line]
        assert lines, kind
        assert lines[0].startswith("[UNSAVED_STATE] "), kind
        assert f"{changed}," in lines[0].replace(" and ", ", "), (kind, lines)


# --- models, tasks, schedules and functions that batches are made by ---


class RunningMean(nn.Sequential):
    """A mean that is None until the first step."""

    mean: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            now = outputs.detach().mean(0)
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return outputs - (0 if self.mean is None else self.mean)


class RunningNumber(RunningMean):
    """The same, as a number."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = nn.Sequential.forward(self, inputs)
        if self.training:
            now = float(outputs.detach().mean())
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return outputs - (self.mean or 0)


class HiddenState(nn.Sequential):
    """What the last batch left, in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if not hasattr(self, "hidden"):
            self.hidden = [torch.zeros(3)]
        if self.training:
            self.hidden[0] = 0.5 * self.hidden[0] + outputs.detach().mean(0)
        return outputs + self.hidden[0]


class LateTask(PlainTask):
    """Smooths its losses by a mean of its own."""

    scale: Tensor | None = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        losses = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        now = losses.detach().mean()
        self.scale = now if self.scale is None else torch.lerp(self.scale, now, 0.1)
        return StepOutput(losses / self.scale)

    eval_step = PlainTask.step


class Slotted:
    """A task without a dictionary."""

    __slots__ = ("num_calls",)

    def __init__(self) -> None:
        self.num_calls = 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.num_calls += model.training
        output = PlainTask().step(model, batch)
        return output._replace(losses=output.losses * (1 + 0.01 * self.num_calls))


class LeavesEvalMode(PlainTask):
    """Looks at the model in evaluation mode, and leaves it there."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        model.eval()
        return output

    eval_step = PlainTask.step


def counting() -> Callable[[Any], Any]:
    calls = 0

    def count(*_: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def closed_forward() -> nn.Module:
    """Return a model with a replaced forward that counts its calls."""
    model = make_net()
    plain, count = model.forward, counting()
    model.forward = lambda inputs: plain(inputs) * (1 + 0.1 * count())  # type: ignore[method-assign]
    return model


def counting_hook() -> nn.Module:
    model = make_net()
    count = counting()
    model[0].register_forward_hook(lambda module, inputs, outputs: outputs * (1 + 0.1 * count()))
    return model


class Growing:
    """A hook with a state of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def grow(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        self.factor *= 1.1
        return outputs * self.factor


def hook_of_an_object() -> nn.Module:
    model = make_net()
    model[0].register_forward_hook(Growing().grow)
    return model


def evaluates_itself() -> nn.Module:
    model = make_net()
    model[3].register_forward_hook(lambda module, inputs, outputs: module.eval() and None)
    return model


def freezes_itself() -> nn.Module:
    model = make_net()

    def freeze(weight: Tensor) -> None:
        weight.requires_grad_(False)

    model[0].weight.register_post_accumulate_grad_hook(freeze)
    return model


def adds_hooks() -> nn.Module:
    """Return a model to which each forward adds a hook."""
    model = make_net()

    def add(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        module.register_forward_hook(lambda module, inputs, outputs: outputs * 1.1)

    model[0].register_forward_hook(add)
    return model


def closed_schedule() -> Callable[[int], float]:
    count = counting()
    return lambda step: 0.1 / count()


def default_schedule() -> Callable[[int], float]:
    def schedule(step: int, calls: list[int] = []) -> float:  # noqa: B006
        calls.append(step)
        return 0.1 / len(calls)

    return schedule


def attribute_schedule() -> Callable[[int], float]:
    def schedule(step: int) -> float:
        schedule.rate *= 0.9  # type: ignore[attr-defined]
        return schedule.rate  # type: ignore[attr-defined,no-any-return]

    schedule.rate = 0.1  # type: ignore[attr-defined]
    return schedule


def partial_schedule() -> Callable[[int], float]:
    def schedule(calls: list[int], step: int) -> float:
        calls.append(step)
        return 0.1 / len(calls)

    return functools.partial(schedule, [])


class Rates:
    """A schedule that is a method."""

    def __init__(self) -> None:
        self.num_calls = 0

    def at(self, step: int) -> float:
        self.num_calls += 1
        return 0.1 / self.num_calls


def mixing() -> DatasetOptions:
    """Return options of batches that a generator of the function's own mixes."""
    generator = np.random.default_rng(0)

    def collate(samples: list[Any]) -> Any:
        inputs = torch.stack([each for each, _ in samples])
        share = float(generator.uniform())
        return share * inputs + (1 - share) * inputs.flip(0), torch.tensor([t for _, t in samples])

    return DatasetOptions(collate=collate)


def sequential(kind: type[nn.Sequential]) -> Callable[[], nn.Module]:
    return lambda: kind(*make_net())


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "None until the first step": ({"model": sequential(RunningMean)}, "model.mean"),
    "a number that is None at first": ({"model": sequential(RunningNumber)}, "model.mean"),
    "a list that is missing at first": ({"model": sequential(HiddenState)}, "model.hidden"),
    "a task's value that is None at first": ({"task": LateTask}, "task.scale"),
    "slots": ({"task": Slotted}, "task.num_calls"),
    "hook that freezes": ({"model": freezes_itself}, "model.0.weight.requires_grad"),
    "leaves evaluation mode on": ({"task": LeavesEvalMode}, "model.0.training"),
    "replaced forward": ({"model": closed_forward}, "counting.<locals>.count.calls"),
    "hook that closes over a number": ({"model": counting_hook}, "counting.<locals>.count.calls"),
    "hook of an object": ({"model": hook_of_an_object}, "model.0.hook.factor"),
    "hook that sets a mode": ({"model": evaluates_itself}, "model.3.training"),
    "closure": ({"schedule": closed_schedule}, "counting.<locals>.count.calls"),
    "default of an argument": ({"schedule": default_schedule}, "schedule.defaults"),
    "attribute of a function": ({"schedule": attribute_schedule}, "schedule.rate"),
    "partial": ({"schedule": partial_schedule}, "schedule.args"),
    "method": ({"schedule": lambda: Rates().at}, "schedule.num_calls"),
    "collate": ({"options": mixing}, "mixing.<locals>.collate.generator"),
}


def built(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts as a start builds them."""
    return {name: part() if name == "schedule" else part for name, part in parts.items()}


def test_a_part_that_keeps_what_no_checkpoint_holds_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, (name, (parts, named)) in enumerate(NAMED.items()):
        caplog.clear()
        train(tmp_path / str(number), **built(parts))
        lines = [line for line in lines_of(caplog) if named in line]
        assert lines, (name, caplog.messages)
        assert lines[0].startswith("[UNSAVED_STATE] "), name


def test_a_model_to_which_each_forward_adds_a_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the evaluation eval changes model\.0\.hooks"):
        train(tmp_path, model=adds_hooks)


class Detached(nn.Module):
    """A backbone that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(inputs).detach())
        return logits


class WithoutGradients(Detached):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(inputs)
        logits: Tensor = self.head(features)
        return logits


def test_parameters_that_no_gradient_reaches_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (Detached, WithoutGradients):
        caplog.clear()
        train(tmp_path / kind.__name__, model=kind)
        (line,) = lines_of(caplog)
        assert line.startswith("[UNUSED_PARAMETERS] ")
        assert "4 of 6 trained parameters" in line
        assert "model.backbone.0.weight" in line


def task_of(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """Return a task of the losses that `measure` returns for logits [B, 3] and targets [B]."""

    class Measured(PlainTask):
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            return StepOutput(measure(model(batch.inputs), batch.targets))

        eval_step = step

    return Measured


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction="none")


COUPLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, targets: F.cross_entropy(logits, targets).expand(len(targets)),
    "sum": lambda logits, targets: (
        torch.ones(len(targets)) * F.cross_entropy(logits, targets, reduction="sum")
    ),
    "broadcast": lambda logits, targets: (logits[:, :1] - targets).square().mean(1),
    "broadcast, other": lambda logits, targets: (logits[:, :1] - targets).abs().sum(0),
    "centred": lambda logits, targets: (logits - logits.mean(0)).square().sum(1),
    "weighted": lambda logits, targets: (
        F.cross_entropy(logits, targets, reduction="none")
        * F.cross_entropy(logits, targets, reduction="none").softmax(0)
    ),
    "contrastive": contrastive,
    "scaled by the largest": lambda logits, targets: (
        logits.square().sum(1) / logits.detach().abs().max()
    ),
}


def test_a_loss_that_depends_on_other_samples_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, (name, measure) in enumerate(COUPLED.items()):
        caplog.clear()
        train(tmp_path / str(number), task=task_of(measure))
        (line,) = lines_of(caplog)
        assert line.startswith("[TASK] "), name
        assert "Measured" in line
        assert "couples_batch" in line


class OwnClassification(ClassificationTask):
    """A task of a user's own, whose losses are not known."""


def num_forwards_at_the_start(folder: Path, task: type[ClassificationTask]) -> int:
    modes: list[bool] = []

    def watched() -> nn.Module:
        model = make_net()
        model.register_forward_hook(lambda module, *_: modes.append(module.training))
        return model

    train(folder, model=watched, task=task)
    return modes.index(True)


def test_a_task_of_this_package_is_not_tried_beside_other_samples(tmp_path: Path) -> None:
    assert num_forwards_at_the_start(tmp_path / "known", ClassificationTask) == 1
    assert num_forwards_at_the_start(tmp_path / "own", OwnClassification) == 3


# --- honest parts ---


class Remembers(nn.Sequential):
    """Keeps what it last saw, for a log."""

    last: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.last = super().forward(inputs).detach()
        return super().forward(inputs)


class FrozenInForward(nn.Sequential):
    """Puts its norm into evaluation mode before each use, and freezes it at the first."""

    def forward(self, inputs: Tensor) -> Tensor:
        self[1].eval()
        if self[1].weight.requires_grad:
            self[1].requires_grad_(False)
        return super().forward(inputs)


class FrozenByTrain(nn.Sequential):
    """Its norm stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()
        return self


class SetsUpLate(nn.Sequential):
    """Makes its table, and chooses its last function, at the first use."""

    table: Any = None
    act: Any = None

    @functools.cached_property
    def scale(self) -> float:
        return 1 / len(self)

    @functools.cache  # noqa: B019
    def places(self, num: int) -> Tensor:
        return torch.arange(float(num))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, inputs.shape[1])
            self.act = torch.tanh
        return self.act(super().forward(inputs + self.table * self.scale + self.places(6)))


class OwnHooks(nn.Sequential):
    """Registers its hooks when it is made."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.seen: dict[str, Tensor] = {}
        self[0].register_forward_hook(self.note)
        self[2].register_full_backward_hook(lambda module, inputs, outputs: None)
        self[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def note(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        return outputs * 0.9


class HooksOneForward(nn.Sequential):
    """Watches a layer during each forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with self[0].register_forward_hook(lambda module, inputs, out: seen.append(out)):
            outputs: Tensor = super().forward(inputs)
        return outputs + 0.1 * seen[0].mean(1, keepdim=True)


class Tied(nn.Sequential):
    """Two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self[2].weight = self[0].weight


class Recurrent(nn.Module):
    """A GRU over the numbers of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.gru(inputs[..., None])[0][:, -1])
        return hidden


class SlottedTask:
    """A task without a dictionary, and nothing that it changes."""

    __slots__ = ("smoothing",)

    def __init__(self) -> None:
        self.smoothing = 0.1

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        return StepOutput(
            F.cross_entropy(
                logits, batch.targets, reduction="none", label_smoothing=self.smoothing
            ),
            logits,
        )


class EvaluatesFirst(PlainTask):
    """Looks at the model in evaluation mode, and goes back."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        with evaluating(model), torch.no_grad():
            sure = model(batch.inputs).softmax(1).max(1).values
        output = super().step(model, batch)
        return output._replace(losses=output.losses * sure)

    eval_step = PlainTask.step


class TrainsWithoutDropout(PlainTask):
    """Puts the model into evaluation mode at the start of each step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        model.eval()
        return super().step(model, batch)

    eval_step = PlainTask.step


class TakesTurns(PlainTask):
    """Trains one half of the model in even steps, and the other in odd ones."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        is_even = batch.position.step % 2 == 0
        net = getattr(model, "module", model)
        net[0].requires_grad_(is_even)
        net[4].requires_grad_(not is_even)
        return super().step(model, batch)

    eval_step = PlainTask.step


class SometimesTrainsItsHead(PlainTask):
    """Trains one layer in every second step."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if batch.position.step % 2 == 0:
            hidden = model[:4](batch.inputs)  # type: ignore[index]
            return StepOutput(hidden.square().mean(1))
        return super().step(model, batch)

    eval_step = PlainTask.step


class FromMean:
    """A model's own mean loss."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        return StepOutput.from_mean(loss, num_items=len(batch))


class Coupled(PlainTask):
    """Compares the samples of a batch with each other."""

    couples_batch = True

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(contrastive(model(batch.inputs), batch.targets))

    eval_step = PlainTask.step


class RemembersLoss(PlainTask):
    """Keeps its last loss for a log."""

    last: Any = None

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        self.last = output.losses.detach().mean()
        self.extremes = (float(self.last), float(output.losses.detach().max()))
        return output

    eval_step = PlainTask.step


class FrozenTeacher(PlainTask):
    """A fixed teacher beside the loss."""

    def __init__(self) -> None:
        self.teacher = make_net().eval().requires_grad_(False)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        wanted = self.teacher(batch.inputs)
        return output._replace(losses=output.losses + (output.outputs - wanted).square().mean(1))

    eval_step = PlainTask.step


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [each.training for each in model.modules()]
    model.eval()
    yield
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode


class Watches(Callback):
    """Looks at the model in evaluation mode, with a hook, and puts all back."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        with evaluating(trainer.model), torch.no_grad():
            seen: list[Tensor] = []
            with trainer.model[0].register_forward_hook(lambda *call: seen.append(call[2])):
                trainer.model(torch.ones(2, 6))
            self.last = float(seen[0].mean())


class HooksAtStart(Callback):
    """Watches activations by a hook that it registers at each start."""

    def on_fit_start(self, trainer: Any) -> None:
        trainer.model[0].register_forward_hook(self.note)

    def note(self, module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        self.last = float(outputs.detach().mean())


class OwnAverage(Callback):
    """An average of the weights that it stores."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_step_end(self, trainer: Any, report: Any) -> None:
        for name, weight in trainer.model.state_dict().items():
            old = self.shadow.get(name, weight)
            self.shadow[name] = torch.lerp(old.float(), weight.float(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class StoredFreezing(Callback):
    """Freezes a layer after the first step, and stores that it did."""

    is_done = False

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if not self.is_done:
            self.is_done = True
            trainer.model[0].requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {"is_done": self.is_done}


class CountsForALog(Callback):
    """Counts, and says that no result depends on it."""

    unsaved_attributes = ("num_steps", "losses")

    def __init__(self) -> None:
        self.num_steps = 0
        self.losses: list[float] = []

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.num_steps += 1
        self.losses.append(float(report.loss_sum))

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        self.best = max(metrics.values())


class FreezesAtStart(Callback):
    def on_fit_start(self, trainer: Any) -> None:
        trainer.model[0].weight.requires_grad_(False)


class Augmented:
    """Random vectors that draw from the global generators, over a cache of the raw ones."""

    def __init__(self, num: int) -> None:
        self.vectors = vectors(num)
        self.raw: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Any:
        if index not in self.raw:
            self.raw[index] = self.vectors[index][0] * 2
        drawn = random.random() + np.random.rand() + torch.rand(6)
        return self.raw[index] + drawn, self.vectors[index][1]


def padding() -> DatasetOptions:
    """Return options of a function that pads, and draws from the global generator."""
    pad = functools.partial(F.pad, pad=(0, 0))

    def collate(samples: list[Any]) -> Any:
        inputs = torch.stack([pad(each) for each, _ in samples])
        return inputs * torch.rand(()), torch.tensor([target for _, target in samples])

    return DatasetOptions(collate=collate)


def warm_up(step: int, *, steps: int = 3) -> float:
    return 0.1 * min(1.0, (step + 1) / steps)


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(6, 8)), *[*make_net()][1:])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(6, 3)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Dropout1d(0.2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.PReLU(),
        nn.AlphaDropout(0.1),
        nn.Linear(4, 3),
    )


def of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": 2, "patch_size": 1}
            layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
            config = ViTConfig(**sizes, **layers, num_channels=1, num_labels=3)
            self.net = ViTForImageClassification(config)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.net(inputs[:, :4].reshape(-1, 1, 2, 2)).logits
            return logits

    return Small()


def each_mean(measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda logits, targets: measure(
        logits, F.one_hot(targets, 3).float(), reduction="none"
    ).mean(1)


norms = nn.utils.parametrizations
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_net,
    "remembers": sequential(Remembers),
    "frozen in the forward": sequential(FrozenInForward),
    "frozen by train": sequential(FrozenByTrain),
    "sets up late": sequential(SetsUpLate),
    "hooks of its own": sequential(OwnHooks),
    "hooks of one forward": sequential(HooksOneForward),
    "tied": Tied,
    "recurrent": Recurrent,
    "transformer": transformer,
    "convolutional": convolutional,
    "spectral norm": normed(norms.spectral_norm),
    "weight norm": normed(norms.weight_norm),
    "old spectral norm": normed(nn.utils.spectral_norm),
    "of transformers": of_transformers,
}
TASKS: dict[str, Callable[[], Any]] = {
    "slots": SlottedTask,
    "evaluates first": EvaluatesFirst,
    "trains without dropout": TrainsWithoutDropout,
    "remembers its loss": RemembersLoss,
    "frozen teacher": FrozenTeacher,
    "mean squared error": task_of(each_mean(F.mse_loss)),
    "smooth absolute error": task_of(each_mean(F.smooth_l1_loss)),
    "binary cross-entropy": task_of(each_mean(F.binary_cross_entropy_with_logits)),
    "margins": task_of(functools.partial(F.multi_margin_loss, reduction="none")),
    "random in evaluations": task_of(
        lambda logits, targets: F.cross_entropy(
            logits + torch.randn_like(logits), targets, reduction="none"
        )
    ),
    "mean of the batch": lambda: FromMean(),
    "coupled, and says so": lambda: Coupled(),
    "no loss at all": task_of(lambda logits, targets: 0 * logits.sum(1)),
    "tiny losses": task_of(lambda logits, targets: 1e-7 * logits.square().sum(1)),
    "larger losses": task_of(lambda logits, targets: 10 * logits.square().sum(1)),
    "likelihood": task_of(
        lambda logits, targets: F.nll_loss(logits.log_softmax(1), targets, reduction="none")
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "takes turns": {"task": TakesTurns},
    "sometimes trains its head": {"task": SometimesTrainsItsHead},
    "callbacks": {"callbacks": lambda: [Watches(), HooksAtStart(), OwnAverage(), CountsForALog()]},
    "stored freezing": {"callbacks": lambda: [StoredFreezing()]},
    "freezes at the start": {"callbacks": lambda: [FreezesAtStart()]},
    "augmentation and a cache": {"data": Augmented},
    "collate": {"options": padding},
    "schedule": {"schedule": lambda: warm_up},
    "partial schedule": {"schedule": lambda: functools.partial(warm_up, steps=2)},
    "closed schedule": {"schedule": lambda: lambda step, rates=(0.1, 0.2): rates[step % 2]},
    "own optimizer": {"optimizer": lambda model: torch.optim.NAdam(model.parameters())},
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_nothing_is_said_of_honest_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cases: dict[str, dict[str, Any]] = {name: {"model": each} for name, each in MODELS.items()}
    cases |= {name: {"task": each} for name, each in TASKS.items()}
    for number, (name, parts) in enumerate((cases | OTHERS).items()):
        train(tmp_path / str(number), **built(parts))
        assert lines_of(caplog) == [], name
