"""Small runs with user-defined parts: models, optimizers and tasks, some of which hide state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    DatasetOptions,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RunResult,
    RuntimeConfig,
    StepOutput,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.types import Batch


class Net(nn.Module):
    """A linear classifier of vectors [B, 6] into 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


class PlainTask:
    """Cross-entropy."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        return StepOutput(F.cross_entropy(logits, batch.targets, reduction="none"), logits)

    eval_step = step  # subclasses change the training only


def vectors(num: int) -> TensorDataset:
    inputs = torch.randn(num, 6, generator=torch.Generator().manual_seed(num))
    return TensorDataset(inputs, torch.arange(num) % 3)


def make_config(
    folder: Path, *, max_steps: int | None = 3, ema_decay: float | None = None
) -> RecipeConfig:
    return RecipeConfig(
        batch=BatchConfig(per_device_batch_size=4),
        trainer=TrainerConfig(num_epochs=2, max_steps=max_steps, ema_decay=ema_decay),
        optimizer=OptimizerConfig(learning_rate=0.05),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=folder, quiet=True),
    )


def run(
    folder: Path, *, max_steps: int = 3, settings: OptimizerConfig | None = None, **parts: Any
) -> RunResult:
    """Train a few steps in `folder`, with the optimizer of `settings` or of the parts."""
    config = make_config(folder, max_steps=max_steps)
    default = OptimizerConfig() if {"optimizer", "schedule"} & {*parts} else config.optimizer
    return train(replace(config, optimizer=settings or default), **parts)


def train(
    config: RecipeConfig,
    *,
    model: Callable[[], nn.Module] = Net,
    task: Callable[[], Any] = PlainTask,
    optimizer: Callable[[nn.Module], Any] | None = None,
    callbacks: tuple[Any, ...] = (),
    metrics: tuple[Any, ...] = (),
    data: Callable[[int], Any] = vectors,
    schedule: Callable[[int], float] | None = None,
    trainer_class: type[Trainer] = Trainer,
    options: DatasetOptions | None = None,
) -> RunResult:
    """Train on vectors; the parts are built as a recipe builds them, at each start."""
    with start_run(config, recipe="planted") as run:
        trainer = build_trainer(
            run,
            model=model(),
            task=task(),
            train_set=data(32),
            eval_sets=data(15),
            metrics=[MeanLoss(), *metrics],
            optimizer=optimizer,
            callbacks=callbacks,
            schedule=schedule,
            trainer_class=trainer_class,
            options=options or DatasetOptions(),
        )
        return trainer.fit()
