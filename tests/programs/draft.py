"""A program while its parts are put together: what they hand to `build_trainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    DatasetOptions,
    RecipeConfig,
    Run,
    RunConfig,
    RunResult,
    RuntimeConfig,
    Task,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from tests.variants import NUM_THREADS

NUM_STEPS = 10
GLOBAL_BATCH = 16
NUM_TRAIN = 4 * GLOBAL_BATCH + GLOBAL_BATCH // 2  # the last of five steps is short


@dataclass
class Draft:
    """What a program gives to `build_trainer`; each part changes some of it.

    `train_set` and `eval_sets` are functions of the run; `variables` are those of its processes.
    """

    config: RecipeConfig
    model: nn.Module = field(default_factory=nn.Module)
    task: Task | Any = None
    train_set: Callable[[Run], Any] = lambda run: None
    eval_sets: Callable[[Run], Any] = lambda run: None
    test_set: Any = None
    metrics: Any = None
    options: DatasetOptions = field(default_factory=DatasetOptions)
    optimizer: Any = None
    callbacks: list[Callback] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    trainer_classes: list[type[Trainer]] = field(default_factory=list)
    fit: Callable[[Trainer], RunResult] = Trainer.fit
    variables: dict[str, str] = field(default_factory=dict)

    def set(self, part: str, **changes: Any) -> None:
        """Change settings of a part of the config, such as `trainer`."""
        changed = {part: replace(getattr(self.config, part), **changes)}
        self.config = replace(self.config, **changed)

    def train(self) -> RunResult:
        """Train in this process."""
        with start_run(self.config, recipe="program") as run:
            trainer = build_trainer(
                run,
                model=self.model,
                task=self.task,
                train_set=self.train_set(run),
                eval_sets=self.eval_sets(run),
                test_set=self.test_set,
                metrics=self.metrics,
                options=self.options,
                optimizer=self.optimizer,
                callbacks=self.callbacks,
                states=self.states,
                metadata=self.metadata,
                trainer_class=type("Own", (*self.trainer_classes, Trainer), {}),
            )
            return self.fit(trainer)


def new_draft(folder: Path) -> Draft:
    """Return a draft of two epochs that saves every third step, and keeps all checkpoints."""
    return Draft(
        RecipeConfig(
            seed=3,
            batch=BatchConfig(
                per_device_batch_size=GLOBAL_BATCH,
                global_batch_size=GLOBAL_BATCH,
                eval_batch_size=5,
            ),
            trainer=TrainerConfig(num_epochs=2, log_every_n_steps=2),
            checkpoint=CheckpointConfig(every_n_steps=3, keep_last_n=99),
            runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=120),
            run=RunConfig(output_dir=folder, quiet=True),
        )
    )
