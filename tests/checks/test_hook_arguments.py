"""A hook that changes what it gets, or looks for gradients where there are none, is named once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)

Hook = Callable[..., object]


def train(folder: Path, hook: str, action: Hook) -> None:
    class Observer(Callback):
        pass

    def call(self: Observer, trainer: Any, *arguments: Any) -> None:
        action(trainer, *arguments)

    setattr(Observer, hook, call)
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=8, accumulation_steps=2),
        trainer=TrainerConfig(num_epochs=2),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="hooks") as run:
        build_trainer(
            run,
            model=nn.Linear(4, 2),
            task=ClassificationTask(),
            train_set=data,
            eval_sets=TensorDataset(inputs[:9] + 1, torch.ones(9).long()),
            callbacks=[Observer()],
        ).fit()


def clamp(trainer: Any, gradients: Any) -> None:
    for each in gradients.values():
        each.clamp_(-1e-3, 1e-3)


def by_parameter(trainer: Any, *_: Any) -> None:
    for each in trainer.model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


CHANGING: dict[str, tuple[str, Hook, str]] = {
    "clamps": ("before_update", clamp, "changes gradient of bias, gradient of weight"),
    "sorts": (
        "before_update",
        lambda trainer, found: found["weight"].copy_(found["weight"].sort().values),
        "changes gradient of weight",
    ),
    "inputs": (
        "before_micro_batch",
        lambda trainer, batch: batch.inputs.add_(1),
        "changes batch.inputs",
    ),
    "targets": (
        "before_micro_batch",
        lambda trainer, batch: batch.targets.zero_(),
        "changes batch.targets",
    ),
    "ids": (
        "before_micro_batch",
        lambda trainer, batch: batch.sample_ids.add_(1),
        "changes batch.sample_ids",
    ),
    "ids of a step": (
        "before_update",
        lambda trainer, gradients: gradients.sample_ids.pop(),
        "changes gradients.sample_ids[1]",
    ),
    "losses of a step": (
        "before_update",
        lambda trainer, gradients: gradients.losses[0].zero_(),
        "changes gradients.losses[0]",
    ),
    "reported losses": (
        "on_step_end",
        lambda trainer, report: report.loss_sum.zero_(),
        "changes report.loss_sum",
    ),
    "reported ids": (
        "on_step_end",
        lambda trainer, report: report.sample_ids[0].zero_(),
        "changes report.sample_ids[0]",
    ),
    "outputs": (
        "on_micro_batch",
        lambda trainer, batch, output: output.outputs.mul_(0),
        "changes output.outputs",
    ),
    "accumulated": ("on_micro_batch", by_parameter, "changes grad of bias, grad of weight"),
    "clips": (
        "before_update",
        lambda trainer, _: clip_grad_norm_(trainer.model.parameters(), 1e-3),
        "reads .grad of parameters",
    ),
    "looks for gradients": ("before_update", by_parameter, "reads .grad of parameters"),
    "looks too late": ("on_step_end", by_parameter, "reads .grad of parameters"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_hook_that_changes_a_step_or_cannot_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    hook, action, fact = CHANGING[name]
    train(tmp_path, hook, action)
    (message,) = [each for each in caplog.messages if "CALLBACK" in each]
    assert message.startswith(f"[CALLBACK] Observer.{hook} {fact}")
    assert "\n" not in message


def norms(trainer: Any, gradients: Any) -> None:
    total = torch.stack([each.norm() for each in gradients.values()]).norm()
    trainer.log("norm", total)
    clamped = {name: each.clone().clamp_(-1, 1) for name, each in gradients.items()}
    trainer.optimizer.param_groups[0]["learning_rate_scale"] = float(clamped["bias"][0] < 2)


def clip(trainer: Any, report: Any) -> None:
    """As of a critic in WGAN; a momentum encoder in the model is changed alike."""
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.clamp_(-0.01, 0.01)


HONEST: dict[str, tuple[str, Hook]] = {
    "clips weights": ("on_step_end", clip),
    "logs norms": ("before_update", norms),
    "clears": ("before_update", lambda trainer, _: trainer.model.zero_grad()),
    "moves": ("on_step_end", lambda trainer, _: trainer.model.to("cpu")),
    "copies": ("on_micro_batch", lambda trainer, batch, output: batch.inputs.clone().add_(1)),
    "keeps": ("on_step_end", lambda trainer, report: report.loss_sum.clone()),
}


@pytest.mark.parametrize("name", HONEST)
def test_nothing_is_said_of_a_hook_that_only_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    train(tmp_path, *HONEST[name])
    assert caplog.messages == []
