"""What the runs of a comparison take on this machine, by a few measured steps."""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer import RecipeConfig
from accel_trainer.commands import measure, plan_run, without_open_settings

from .question import Question

_MEASURED_S = 5.0


@dataclass(frozen=True)
class Price:
    """The seconds of the parts of a run, and how many samples an epoch has."""

    num_samples: int
    start_s: float
    step_s: float
    """With its share of evaluations and checkpoints."""
    end_s: float

    @classmethod
    def measured(cls, question: Question) -> Price:
        """Return the price of runs of A, after training a few steps of it in a temporary folder.

        Raises:
            TrialFailed: the recipe failed, and has said why.
            OutputError: it trained nothing.
        """
        found = measure(
            question.recipe,
            question.a.flags,
            num_processes=question.num_processes,
            seconds=_MEASURED_S,
        )
        num_samples = found.batch.num_samples
        config = without_open_settings(question.a.config, num_samples, question.num_processes)
        step_s = found.repeated_s(plan_run(config, found.batch))
        return cls(num_samples, found.times.start_s, step_s, found.end_s)

    def seconds(self, num_steps: int) -> float:
        """Return the time of a run, or of a part of it, of so many steps."""
        return self.start_s + num_steps * self.step_s + self.end_s


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
