"""How many steps the runs of a comparison have."""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer import RecipeConfig
from accel_trainer.commands import measure, plan_run, without_open_settings

from .question import Question


def count_samples(question: Question) -> int:
    """Return how many samples an epoch of A has, after a few steps of it in a temporary folder.

    Raises:
        TrialFailed: the recipe failed, and has said why.
        OutputError: it trained nothing.
    """
    a, num_processes = question.a, question.num_processes
    found = measure(question.recipe, a.flags, num_processes=num_processes, seconds=0)
    return found.batch.num_samples


@dataclass(frozen=True)
class Length:
    """How many steps a run has, and each of its epochs."""

    num_steps: int
    steps_per_epoch: int

    @classmethod
    def of(cls, config: RecipeConfig, num_samples: int, num_processes: int) -> Length:
        """Return the length of a run of `config`."""
        config = without_open_settings(config, num_samples, num_processes)
        batch = config.batch.plan(num_samples, num_processes=num_processes)
        return cls(plan_run(config, batch).num_steps, batch.steps_per_epoch)
