"""The steps of a run, from its config and its batches: nothing is started for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.batch_plan import BatchPlan
from ...core.errors import ConfigError
from ...core.learning_rate import Schedule
from ...core.train_state import TrainState
from ...run.config import RecipeConfig, with_defaults
from ...run.optimization import plan_learning_rate
from ...vision.rules import PhotoFacts, PhotoRecipeConfig, choose_settings

_MAX_STEPS = 10_000_000  # more would take minutes to list


@dataclass(frozen=True)
class RunPlan:
    """What a run will do, computed from its config and its batches. Steps count from 1."""

    config: RecipeConfig
    batch: BatchPlan
    peak_learning_rate: float
    warmup_steps: int
    learning_rate_at: Schedule
    num_steps: int
    evaluation_steps: Sequence[int]
    save_steps: Sequence[int]


def without_open_settings(
    config: RecipeConfig, num_samples: int, num_processes: int
) -> RecipeConfig:
    """Return the config with what a recipe on photos would choose."""
    if not isinstance(config, PhotoRecipeConfig):
        return with_defaults(config)
    facts = PhotoFacts(
        num_photos=num_samples,
        is_pretrained=config.starts_from_weights,
        num_processes=num_processes,
    )
    return with_defaults(choose_settings(config, facts)[0])


def plan_run(config: RecipeConfig, batch: BatchPlan) -> RunPlan:
    """Return what a run of `config` with these batches will do.

    Raises:
        ConfigError: the run would refuse to start.
    """
    if config.trainer.hours is not None:
        raise ConfigError(
            "PLAN",
            f"--hours {config.trainer.hours:g} decides the length of the run while it trains: "
            "set --epochs or --steps instead",
        )
    peak_learning_rate, learning_rate_at = plan_learning_rate(config, batch)
    num_steps = config.trainer.last_step(batch.steps_per_epoch)
    if num_steps > _MAX_STEPS:
        raise ConfigError(
            "PLAN", f"the run has {num_steps:,} steps: plan fewer, such as with --max-steps 1000000"
        )
    # A run also evaluates and saves at its last step.
    evaluation_steps = {num_steps}
    save_steps = {num_steps}
    for position in _positions(config, batch):
        if config.trainer.evaluates_after(position, batch.steps_per_epoch):
            evaluation_steps.add(position.optimizer_step)
        if position.step_in_epoch == batch.steps_per_epoch:
            position = position.after_epoch()
        if config.checkpoint.is_due(position):
            save_steps.add(position.optimizer_step)
    if config.trainer.num_steps is not None:  # each evaluation is in a checkpoint
        save_steps |= evaluation_steps
    return RunPlan(
        config=config,
        batch=batch,
        peak_learning_rate=peak_learning_rate,
        warmup_steps=config.schedule.num_warmup_steps(
            total_steps=config.trainer.total_steps(batch.steps_per_epoch),
            steps_per_epoch=batch.steps_per_epoch,
        ),
        learning_rate_at=learning_rate_at,
        num_steps=num_steps,
        evaluation_steps=sorted(evaluation_steps),
        save_steps=sorted(save_steps),
    )


def _positions(config: RecipeConfig, batch: BatchPlan) -> Iterator[TrainState]:
    """Yield the position of the run after each step, before the next epoch begins."""
    position = TrainState()
    num_steps = config.trainer.last_step(batch.steps_per_epoch)
    while position.optimizer_step < num_steps:
        position = position.after_step(batch.step_batch_size(position.step_in_epoch))
        yield position
        if position.step_in_epoch == batch.steps_per_epoch:
            position = position.after_epoch()
