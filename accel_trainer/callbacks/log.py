"""The record of a run: one row of numbers per log interval and per evaluation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from ..compilation import Stopwatch
from ..history import History
from ..loader import DatasetLoader
from ..meters import Meters
from ..metrics import is_number
from ..run_folder import writes_to
from ..types import StepReport
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer

Row = Mapping[str, Any]

_logger = logging.getLogger(__name__)

_MUCH_WAITING, _WORTH_A_HINT_S = 0.2, 10.0


class MetricsLog(Callback):
    """Writes rows to the history and hands them on to `sinks` (progress, trackers), on the main process.

    A row has `event` (`train` or `eval`), `optimizer_step`, `epoch` and numbers; (event, optimizer_step)
    never repeats. Rows are the same whether or not the run was interrupted, but for `perf/...`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        history: History | None,
        every_n_steps: int,
        preparation: Stopwatch | None = None,
        sinks: Sequence[Callable[[Row], None]] = (),
    ) -> None:
        self._meters = Meters(accelerator)
        self._history, self._every_n_steps, self._sinks = history, every_n_steps, sinks
        self._preparation = preparation or Stopwatch()
        self._total_s, self._total_items = 0.0, 0
        self._was_hinted = False

    @property
    def items_per_s(self) -> float | None:
        """Samples per second of training over all processes in this attempt; None before the first row."""
        return self._total_items / self._total_s if self._total_items else None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._restart_timer(trainer)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Write a row every n steps and at the end of each epoch. **Collective. Host sync** when it does."""
        self._meters.update(report)
        self._timed_items += report.num_items
        is_epoch_end = trainer.state.step_in_epoch == trainer.loader.plan.steps_per_epoch
        if is_epoch_end or report.optimizer_step % self._every_n_steps == 0:
            self._write_training(trainer)

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Write the evaluation's numbers as a row, after one of the steps before it that have none yet."""
        if self._meters.num_steps:
            self._write_training(trainer)
        self._write("eval", trainer, {name: value for name, value in metrics.items() if is_number(value)})

    def _write_training(self, trainer: Trainer) -> None:
        """Write a row of the steps since the last one. **Collective. Host sync.**"""
        values = self._meters.read()  # waits for the device: the clock is read after it
        preparation_s = self._preparation.seconds - self._prepared_before_s
        evaluated_s = trainer.watchdog.phase_s.get("evaluation", 0.0) - self._evaluated_before_s
        seconds = time.perf_counter() - self._timer_start_s - preparation_s - evaluated_s
        values["optim/learning_rate"] = trainer.learning_rate_at(trainer.state.optimizer_step - 1)
        if trainer.accelerator.scaler is not None:
            values["optim/loss_scale"] = trainer.accelerator.scaler.get_scale()
        if self._timed_items:  # none if this attempt only evaluates what one before it trained
            self._total_s, self._total_items = self._total_s + seconds, self._total_items + self._timed_items
            values["perf/images_per_s"] = self._timed_items / seconds
            waited = (trainer.data_wait.seconds - self._waited_before_s) / seconds
            values["perf/data_wait_fraction"] = waited
            self._hint(trainer, waited)
        if preparation_s:
            values["perf/compile_s"] = preparation_s
        self._write("train", trainer, values)
        self._restart_timer(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Leave the evaluation out of the throughput."""
        self._restart_timer(trainer)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Make the rows durable."""
        if self._history is not None:
            with writes_to(self._history.path.parent):
                self._history.sync()

    def _write(self, event: str, trainer: Trainer, values: Mapping[str, Any]) -> None:
        state = trainer.state
        # People count epochs from 1: the epoch that the step belongs to.
        epoch = state.epoch + (state.step_in_epoch > 0)
        row = {"event": event, "optimizer_step": state.optimizer_step, "epoch": epoch, **values}
        if self._history is not None:
            self._history.append(row)
        for sink in self._sinks:
            sink(row)

    def _restart_timer(self, trainer: Trainer) -> None:
        self._timer_start_s, self._timed_items = time.perf_counter(), 0
        self._waited_before_s, self._prepared_before_s = trainer.data_wait.seconds, self._preparation.seconds
        self._evaluated_before_s = trainer.watchdog.phase_s.get("evaluation", 0.0)

    def _hint(self, trainer: Trainer, fraction: float) -> None:
        """Say once that the data holds up the training, if it has for a while."""
        is_much = fraction > _MUCH_WAITING and trainer.data_wait.seconds > _WORTH_A_HINT_S
        if is_much and trainer.accelerator.is_main_process and not self._was_hinted:
            self._was_hinted = True
            advice = ": raise --batch.num-workers" if isinstance(trainer.loader, DatasetLoader) else ""
            _logger.warning("data wait %.0f %%%s", 100 * fraction, advice)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last row and the length of the history. **Collective. Host sync.**"""
        return {
            "meters": self._meters.state_dict(),
            "history_bytes": self._history.size if self._history else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums and cut the history back to what it held at the checkpoint."""
        self._meters.load_state_dict(state["meters"])
        if self._history is not None:
            self._history.truncate(state["history_bytes"])
