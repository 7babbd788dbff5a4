"""Parts that change the model beside the optimizer, or that no gradient reaches, are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import Callback, CheckpointError, ClassificationTask, StepOutput
from accel_trainer.core.types import Batch

from ..training.planted import PlainTask, run
from .honest import contrastive, make_net, task_of


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("[")]


# --- callbacks ---


class Changes(Callback):
    """Does something to the model after the first step."""

    change: Callable[[Any], Any]

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == 1:
            type(self).change(trainer.model)


def add_forward_hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, inputs, outputs: outputs * 1.5)  # type: ignore[index]


def add_backward_hook(model: nn.Module) -> None:
    model[2].register_full_backward_hook(lambda *_: None)  # type: ignore[index]


def add_gradient_hook(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "EvalMode": (lambda model: model.eval(), "model.0.training"),
    "EvalModeOfOne": (lambda model: model[3].eval(), "model.3.training"),
    "Freezes": (lambda model: model[0].requires_grad_(False), "model.0.bias.requires_grad"),
    "AddsForwardHook": (add_forward_hook, "model.0.hooks"),
    "AddsBackwardHook": (add_backward_hook, "model.2.hooks"),
    "AddsGradientHook": (add_gradient_hook, "model.0.weight.hooks"),
    "RemovesHook": (lambda model: model[2]._forward_hooks.clear(), "model.2.hooks"),
    "Swaps": (lambda model: model.__setitem__(2, nn.GELU()), "model.2"),
    "ReplacesForward": (lambda model: setattr(model[2], "forward", torch.tanh), "model.2"),
}


class AfterEvaluation(Callback):
    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        trainer.model.half().float()


class AfterSave(Callback):
    """Changes weights that a checkpoint was already made of."""

    def on_checkpoint(self, trainer: Any, name: str) -> None:
        with torch.no_grad():
            trainer.model[0].bias.add_(0.1)


CALLBACKS: dict[type[Callback], str] = {
    AfterEvaluation: "model.0.weight",
    AfterSave: "model.0.bias",
} | {
    type(name, (Changes,), {"change": staticmethod(change)}): changed
    for name, (change, changed) in CHANGES.items()
}


def frozen_norm() -> nn.Module:
    model = make_net()
    model[1].requires_grad_(False)
    model[2].register_forward_hook(lambda *_: None)
    return model


def test_a_callback_that_changes_the_model_is_named_with_what_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault (Resume): a callback leaves the model in evaluation mode, freezes it, adds hooks, swaps
    modules or changes weights; or a step leaves modules in a different mode, or parameters
    frozen -> a warning lists what changes
    """
    for kind, changed in CALLBACKS.items():
        caplog.clear()
        run(tmp_path / kind.__name__, model=frozen_norm, callbacks=(kind(),))
        lines = [line for line in lines_of(caplog) if kind.__name__ in line]
        assert lines, kind
        assert lines[0].startswith("[UNSAVED_STATE] "), kind
        assert f"{changed}," in lines[0].replace(" and ", ", "), (kind, lines)


# --- models and tasks that change themselves ---


class LeavesEvalMode(PlainTask):
    """Looks at the model in evaluation mode, and leaves it there."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        model.eval()
        return output

    eval_step = PlainTask.step


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


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"model": make_net, "task": LeavesEvalMode}, "model.0.training"),
        ({"model": evaluates_itself}, "model.3.training"),
        ({"model": freezes_itself}, "model.0.weight.requires_grad"),
    ],
)
def test_a_mode_that_a_step_leaves_behind_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: dict[str, Any], named: str
) -> None:
    run(tmp_path, **parts)
    lines = [line for line in lines_of(caplog) if named in line]
    assert lines, caplog.messages
    assert lines[0].startswith("[UNSAVED_STATE] ")


def adds_hooks() -> nn.Module:
    """Return a model to which each forward adds a hook."""
    model = make_net()

    def add(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        module.register_forward_hook(lambda module, inputs, outputs: outputs * 1.1)

    model[0].register_forward_hook(add)
    return model


def test_a_model_to_which_each_forward_adds_a_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the evaluation eval changes model\.0\.hooks"):
        run(tmp_path, model=adds_hooks)


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
        run(tmp_path / kind.__name__, model=kind)
        (line,) = lines_of(caplog)
        assert line.startswith("[UNUSED_PARAMETERS] ")
        assert "4 of 6 trained parameters" in line
        assert "model.backbone.0.weight" in line


# --- losses ---

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
        run(tmp_path / str(number), model=make_net, task=task_of(measure))
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

    run(folder, model=watched, task=task)
    return modes.index(True)


def test_a_task_of_this_package_is_not_tried_beside_other_samples(tmp_path: Path) -> None:
    assert num_forwards_at_the_start(tmp_path / "known", ClassificationTask) == 1
    assert num_forwards_at_the_start(tmp_path / "own", OwnClassification) == 3
