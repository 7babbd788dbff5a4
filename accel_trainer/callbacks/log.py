"""The record of a run: one row of numbers per log interval and per evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from ..history import History
from ..meters import Meters
from ..types import StepReport
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer

Row = Mapping[str, Any]


class MetricsLog(Callback):
    """Writes rows to the history and hands them on to `sinks` (progress, trackers), on the main process.

    A row has `event` (`train` or `eval`), `optimizer_step`, `epoch` and numbers; (event, optimizer_step)
    never repeats. Rows are the same whether or not the run was interrupted, but for `perf/...`.
    """

    is_essential = True

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        history: History | None,
        every_n_steps: int,
        sinks: Sequence[Callable[[Row], None]] = (),
    ) -> None:
        self._meters = Meters(accelerator)
        self._history, self._every_n_steps, self._sinks = history, every_n_steps, sinks
        self._timer_start_s, self._timed_items = time.perf_counter(), 0
        self._total_s, self._total_items = 0.0, 0

    @property
    def items_per_s(self) -> float | None:
        """Samples per second of training over all processes in this attempt; None before the first row."""
        return self._total_items / self._total_s if self._total_items else None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._restart_timer()

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Write a row every n steps and at the end of each epoch. **Collective. Host sync** when it does."""
        self._meters.update(report)
        self._timed_items += report.num_items
        is_epoch_end = trainer.state.step_in_epoch == trainer.loader.plan.steps_per_epoch
        if report.optimizer_step % self._every_n_steps and not is_epoch_end:
            return
        values = self._meters.read()  # waits for the device: the clock is read after it
        seconds = time.perf_counter() - self._timer_start_s
        self._total_s, self._total_items = self._total_s + seconds, self._total_items + self._timed_items
        values["optim/learning_rate"] = report.learning_rate
        if trainer.accelerator.scaler is not None:
            values["optim/loss_scale"] = trainer.accelerator.scaler.get_scale()
        values["perf/images_per_s"] = self._timed_items / seconds
        self._write("train", report.optimizer_step, report.epoch, values)
        self._restart_timer()

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Write the evaluation's numbers as a row."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        self._write("eval", trainer.state.optimizer_step, trainer.state.epoch, numbers)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Leave the evaluation out of the throughput."""
        self._restart_timer()

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Make the rows durable."""
        if self._history is not None:
            self._history.sync()

    def _write(self, event: str, optimizer_step: int, epoch: int, values: Mapping[str, Any]) -> None:
        # People count epochs from 1: the epoch that the step belongs to.
        row = {"event": event, "optimizer_step": optimizer_step, "epoch": epoch + 1, **values}
        if self._history is not None:
            self._history.append(row)
        for sink in self._sinks:
            sink(row)

    def _restart_timer(self) -> None:
        self._timer_start_s, self._timed_items = time.perf_counter(), 0

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
