"""What people see of a run: a bar on a terminal, plain lines elsewhere; on the main process only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..core.callback import Callback, RunResult, TrainerView
from ..core.train_state import checkpoint_name
from ..core.types import StepReport
from ..distributed.streams import start_copy
from ..training.config import TrainerConfig
from ..training.metrics import is_number
from .console import fold, say, terminal_columns

_WIDE = "{desc} |{bar}| {n_fmt}/{total_fmt}  {remaining} left  {rate_fmt}{postfix}"
_NARROW = "{percentage:3.0f}%|{bar}| {remaining} {rate_fmt}{postfix}"
_MIN_BAR = 4


class ProgressBar(Callback):
    """Shows each row of numbers (`show` is a sink of `MetricLogger`), and the steps and time left.

    The time left follows from the time per step of this attempt, which includes logs, saves and evaluations. Until the
    first row the bar shows the loss of the first step, of this process, as soon as the device has computed it.
    """

    def __init__(self, config: TrainerConfig, *, banner: str, is_quiet: bool = False) -> None:
        self._config, self._banner, self._is_quiet = config, banner, is_quiet
        self._bar: tqdm[Any] = tqdm(disable=True)
        self._terminal = ExitStack()
        self._columns = terminal_columns()
        self._first_loss: Callable[[], float | None] | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Show what is about to run, and where it starts."""
        self._first_step = trainer.state.optimizer_step
        self._start_s, self._num_epochs = time.monotonic(), self._config.num_epochs
        num_steps = self._num_epochs * trainer.loader.plan.steps_per_epoch
        self._num_steps = min(self._config.max_steps or sys.maxsize, num_steps)
        self.write(self._banner)
        if trainer.is_finished and self._first_step:
            self.write(f"this run is finished: nothing left to train after step {self._first_step}")
            return
        if self._first_step:
            where = f"after step {self._first_step}, epoch {trainer.state.epoch + 1} of {self._num_epochs}"
            self.write(f"continuing {where}, from {checkpoint_name(trainer.state)}")
        if sys.stderr.isatty() and not self._is_quiet:
            self._terminal.enter_context(logging_redirect_tqdm())  # a warning gets a line of its own
            steps = {"total": self._num_steps, "initial": self._first_step, "unit": "step", "smoothing": 0}
            bar = tqdm(**steps, bar_format=_NARROW, dynamic_ncols=True, file=sys.stderr)
            self._bar = self._terminal.enter_context(bar)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Move the bar."""
        epoch = f"epoch {report.epoch + 1}/{self._num_epochs}"
        if not self._bar.disable and self._bar.desc:
            self._bar.set_description_str(epoch, refresh=False)
        self._bar.update()
        if self._bar.disable or self._bar.desc or report.was_skipped:
            return
        if self._first_loss is None:
            samples = report.num_samples / trainer.accelerator.num_processes
            self._first_loss = start_copy(report.loss_sum / (samples if report.num_items is None else report.num_items))
        if (loss := self._first_loss()) is not None:
            self._show_on_bar(epoch, {"train/loss": loss})

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of numbers."""
        if self._is_quiet:
            return
        step, left, epoch = row["optimizer_step"], "", f"epoch {row['epoch']}/{self._num_epochs}"
        if row["event"] == "train" and step > self._first_step:
            if not self._bar.disable:
                self._show_on_bar(epoch, row)
                return
            step_s = (time.monotonic() - self._start_s) / (step - self._first_step)
            left = f"{tqdm.format_interval(step_s * (self._num_steps - step))} left"
        self.write(f"{epoch}  step {step}/{self._num_steps}  {'  '.join(_numbers(row))}  {left}".rstrip())

    def _show_on_bar(self, epoch: str, row: Mapping[str, Any]) -> None:
        """Show as many numbers as fit, at least the first."""
        numbers = _numbers(row)
        self._bar.set_description_str(epoch, refresh=False)
        for count in range(len(numbers), -1, -1):
            self._bar.bar_format = _WIDE if count else _NARROW
            self._bar.set_postfix_str("  ".join(numbers[: count or 1]), refresh=False)
            now = self._bar.format_dict
            text = tqdm.format_meter(**now | {"bar_format": self._bar.bar_format.replace("{bar}", ""), "ncols": None})
            if len(text) + _MIN_BAR <= (now["ncols"] or 80):
                break
        self._bar.refresh()

    def write(self, text: str) -> None:
        """Show some lines, above the bar if there is one."""
        if not self._is_quiet:
            say(fold(text, self._columns), write=tqdm.write)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Show how it ended."""
        self._terminal.close()
        step, best = result.position.optimizer_step, result.best
        self.write(f"{result.state}: {result.stop_reason} at step {step}  {'  '.join(_numbers(result.metrics))}")
        if best is not None:
            self.write(f"best: {_short(best.metric)} {best.value:.4f} in {best.name}")

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._terminal.close()


def _numbers(row: Mapping[str, Any]) -> list[str]:
    numbers = {name: value for name, value in row.items() if "/" in name and is_number(value)}
    return [f"{_short(name)} {_number(name, value)}" for name, value in numbers.items()]


def _short(name: str) -> str:
    """Return the name as a person says it: `train/loss` is loss, `eval/accuracy` eval accuracy."""
    group, _, rest = name.partition("/")
    rest = rest.replace("_", " ").replace(" per s", "/s").removesuffix(" fraction").removesuffix(" gib")
    return rest if group in ("train", "optim", "perf") else f"{group.replace('_', ' ')} {rest}"


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(("accuracy", "fraction")):
        return f"{100 * value:.2f}%"
    if name.endswith("_gib"):
        return f"{value:.1f} GiB"
    return f"{value:,.0f}" if name.startswith("perf/") else f"{value:.4g}"
