"""Refuses lengths in epochs for a stream that has none."""

from __future__ import annotations

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..optim.lr_scheduler import ScheduleConfig
from ..training.config import TrainerConfig


def refuse_epochs(trainer: TrainerConfig, schedule: ScheduleConfig, plan: BatchPlan) -> None:
    """Raise ConfigError for settings in epochs if the data is a stream without a length."""
    every = trainer.evaluate_every or ""
    in_epochs = {
        "--epochs is {}: set --steps, such as --steps 20000": trainer.num_epochs,
        "--evaluate-every is {}: set it in steps, such as 500steps": "epoch" in every and every,
        "--schedule.warmup-epochs is {}: set --schedule.warmup-steps": (schedule.warmup_epochs),
    }
    for problem, value in in_epochs.items():
        if plan.is_endless and value:
            raise ConfigError(
                "DATA_STREAM",
                f"a stream without a length has no epochs, and {problem.format(value)}",
            )
