"""The time and the memory of a run on this machine, from a few steps of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ...core.batch_plan import BatchPlan
from ...core.errors import OutputError
from ...core.json_files import read_json_object
from ..common.output import Numbers
from ..common.processes import train_recipe
from ..recipe.start import Start
from ..runs.run_reader import read_run
from .steps import RunPlan
from .timer import NUM_FIRST_STEPS, TIMER, Times

_MAX_BYTES = 2**20
_NEVER = 10**9
# It evaluates and saves only at the end.
_CHANGES = {
    "run.resume": "never",
    "run.track": (),
    "run.quiet": True,
    "run.dry_run": False,
    "trainer.max_time_s": None,
    "trainer.hours": None,
    "trainer.evaluate_every": f"{_NEVER}steps",
    "checkpoint.every_n_steps": None,
    "checkpoint.every_n_epochs": _NEVER,
}


class TrialFailed(Exception):
    """The recipe failed, and has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Measured:
    """What a few steps of a run took on this machine, all in seconds but the memory."""

    batch: BatchPlan
    times: Times
    save_s: float
    """Of a checkpoint, from its copy until it is on the disk, while nothing trained."""
    end_s: float
    """From the last evaluation to the end of the process, with the whole test set."""
    total_s: float
    """Of the measurement itself."""

    @property
    def step_s(self) -> float:
        """The time of a step, without the first ones."""
        return self.times.steps_s / max(1, self.times.num_steps)

    @property
    def once_s(self) -> float:
        """The time of the start and the end of a run."""
        return self.times.start_s + self.end_s

    def repeated_s(self, plan: RunPlan) -> float:
        """Return the seconds of a step with its part of the evaluations and checkpoints."""
        return (sum(self.costs(plan).values()) - self.once_s) / max(plan.num_steps, 1)

    def costs(self, plan: RunPlan) -> Numbers:
        """Return the seconds of the parts of a whole run, by their names."""
        return {
            "start": self.times.start_s,
            "training": max(0, plan.num_steps - NUM_FIRST_STEPS) * self.step_s,
            "evaluation": len(plan.evaluation_steps) * self.times.evaluation_s,
            "checkpoints": len(plan.save_steps) * self.save_s,
            "end": self.end_s,
        }


def measure(recipe: Path, flags: Sequence[str], *, num_processes: int, seconds: float) -> Measured:
    """Train a few steps of a recipe in new processes, and return what they took.

    Raises:
        TrialFailed: the recipe failed, and has said why.
        OutputError: it trained nothing.
    """
    with TemporaryDirectory(prefix="plan-") as folder:
        run, file, start_time = Path(folder, "run"), Path(folder, "times.json"), time.time()
        timer = {"file": str(file), "seconds": seconds, "start_time": start_time}
        start = Start(
            recipe=str(recipe),
            flags=[*flags, "--dry-run"],  # for a recipe that does not call `main`
            num_processes=num_processes,
            changes={"run.output_dir": str(run), **_CHANGES},
            callbacks={TIMER: timer},
        )
        code = train_recipe(start)
        end_time = time.time()
        if code:
            raise TrialFailed(code)
        if not file.exists():
            raise OutputError("PLAN", "the recipe trained nothing: start it by itself to see why")
        times = Times(**read_json_object(file, max_bytes=_MAX_BYTES))
        phase_s = read_run(run).phase_s
        return Measured(
            batch=BatchPlan(**times.batch),
            times=times,
            save_s=sum(phase_s.get(phase, 0.0) for phase in ("save", "disk"))
            / max(1, times.num_saves),
            end_s=end_time - times.evaluated_time + times.rest_of_test_s,
            total_s=end_time - start_time,
        )
