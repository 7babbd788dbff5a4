"""`--hours`: decides, once, at which step a trunk begins to decay, so that it ends in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from tqdm import tqdm

from accel_trainer.callbacks.console import say, terminal_columns, wrap_lines
from accel_trainer.cli.recipe.start import added_callbacks
from accel_trainer.core.batch_plan import ENDLESS
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.learning_rate import Decay
from accel_trainer.core.types import StepReport
from accel_trainer.distributed.collectives import run_on_main
from accel_trainer.run.config import RecipeConfig
from accel_trainer.run.data import RunData
from accel_trainer.run.extra_callbacks import Observer
from accel_trainer.training.callback import RunResult, TrainerView

NOTE = "hours"
"""The entry of the metadata: the seconds spent so far, and what is decided."""
DECAY = 0.1
"""The steps of the decay, as a fraction of those before it."""
_NUM_FIRST = 3  # steps of an attempt, which allocate and compile
_LOOK_EVERY = 50  # steps, at most: looking waits for the device
_REASON = "hours reached"


def check_hours(config: RecipeConfig) -> None:
    """Raise ConfigError for `--hours` without a trunk, or with what it would decide itself."""
    schedule, trainer = config.schedule, config.trainer
    found = (schedule.shape, schedule.decay_at, trainer.max_time_s)
    if trainer.hours is not None and found != ("trunk", None, None):
        raise ConfigError(
            "CONFIG",
            f"--hours {trainer.hours:g} decides when a trunk decays and ends: set --schedule.shape "
            "trunk, and leave --schedule.decay-at and --trainer.max-time-s out",
        )


@contextmanager
def ending_in_time(config: RecipeConfig) -> Iterator[None]:
    """Let the run that starts inside decide when it ends. A dry run decides nothing."""
    check_hours(config)
    if config.trainer.hours is None or config.run.dry_run:
        yield
        return
    arguments = {
        "hours": config.trainer.hours,
        "start_s": process_start_s(),
        "is_quiet": config.run.quiet,
    }
    with added_callbacks(__file__, arguments):
        yield


def process_start_s() -> float:
    """Return when this process began, on the monotonic clock."""
    return time.monotonic() - time.time() + float(psutil.Process().create_time())


@dataclass(eq=False)
class Hours(Observer):
    """Decides where the decay begins and ends, and ends the run there.

    The main process measures the steps of this attempt with their evaluations and saves. Once a
    decay over a tenth of the steps so far would take the time that is left, it decides. From then
    on only these steps count, which all checkpoints store: no resume looks at the clock again.
    """

    hours: float
    start_s: float
    """When the attempt began, on the `clock`."""
    is_quiet: bool
    clock: Callable[[], float] = time.monotonic

    ends_run = True

    def build_data(self, build: Callable[..., RunData], *sets: Any) -> RunData:
        """Refuse other hours than those with which the run has decided: nothing is changed yet."""
        checkpoint = sets[0].checkpoint
        stored = {} if checkpoint is None else checkpoint.manifest.get("metadata", {})
        note = stored.get(NOTE, {})
        if note.get("hours", self.hours) != self.hours:
            raise ConfigError(
                "CONFIG",
                f"--hours {self.hours:g}: with {note['hours']:g}, the run has decided to end with "
                f"step {note['num_steps']}: set them back, or branch off with --resume from a "
                "checkpoint before the decision",
            )
        return super().build_data(build, *sets)

    def see_parts(self, parts: Mapping[str, Any]) -> None:
        """Keep where the trunk decays, which is decided here."""
        self._decay: Decay = parts["decay"]

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Continue with the time that earlier attempts have left, or with what they decided."""
        note = trainer.metadata.get(NOTE, {})
        self._before_s = note.get("spent_s", 0.0)
        self._decay.start = note.get("decay_at", ENDLESS)
        self._decay.end = note.get("num_steps", ENDLESS)
        self._first = trainer.state.optimizer_step + _NUM_FIRST
        self._next_look = self._first + _NUM_FIRST
        self._stop_if_due(trainer)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Look at the clock where that is due. **Collective. Host sync** then."""
        step = report.optimizer_step
        if step == self._first:
            self._first_s = self._spent_s
        if step >= self._next_look and self._decay.end == ENDLESS:
            float(report.loss_sum)  # waits for the device
            num_left = run_on_main(lambda: self._steps_left(step), trainer.accelerator)
            too_many = int(num_left - DECAY * step)
            # A part of the way to the decision: the machine may become slower.
            self._next_look = step + min(max(1, too_many // 4), _LOOK_EVERY)
            if too_many <= 0:
                self._decay.start, self._decay.end = step, step + max(1, num_left)
                text = f"--hours: the learning rate decays after step {step}, and the run ends with"
                self._show(trainer, f"{text} step {self._decay.end}")
                trainer.request_save()
        self._stop_if_due(trainer)

    def _steps_left(self, step: int) -> int:
        """Return how many steps, with evaluations and saves, fit into the time that is left."""
        step_s = (self._spent_s - self._first_s) / (step - self._first)
        return int((3600 * self.hours - self._spent_s) / step_s)

    def _stop_if_due(self, trainer: TrainerView) -> None:
        if trainer.state.optimizer_step >= self._decay.end:
            trainer.request_stop(_REASON)

    def before_save(self, trainer: TrainerView) -> None:
        """Note the time and the decay: a resume goes on from them."""
        note = {"spent_s": self._spent_s}
        if self._decay.end != ENDLESS:
            decided = {"decay_at": self._decay.start, "num_steps": self._decay.end}
            note |= {**decided, "hours": self.hours}
        trainer.metadata[NOTE] = note

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Tell how the time compares with the hours."""
        has_trained = trainer.state.optimizer_step > self._first - _NUM_FIRST
        if result.stop_reason == _REASON and has_trained:
            late_s = self._spent_s - 3600 * self.hours
            more = f"{abs(late_s):.0f} s {'more' if late_s > 0 else 'less'} than --hours"
            self._show(trainer, f"the run took {tqdm.format_interval(self._spent_s)}, {more}")

    def _show(self, trainer: TrainerView, text: str) -> None:
        """Show a text above the bar, if there is one."""
        if trainer.accelerator.is_main_process and not self.is_quiet:
            say(wrap_lines(text, terminal_columns()), write=tqdm.write)

    @property
    def _spent_s(self) -> float:
        """The seconds of all attempts, without what killed ones did after their last checkpoint."""
        return float(self._before_s + self.clock() - self.start_s)
