"""Shows the progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..core.callback import Callback, RunResult, TrainerView
from ..core.console import fold, say, terminal_columns
from ..core.train_state import checkpoint_name
from ..core.types import StepReport
from ..training.config import TrainerConfig
from ..training.metrics import is_number

# The loss stands before the speed: tqdm cuts off what does not fit on a narrow terminal.
_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt}  {remaining} left{postfix}  {rate_fmt}"
_NUM_ON_BAR = 2


class ProgressBar(Callback):
    """Shows rows of numbers (`show` is a sink of `MetricLogger`), the steps, and the time left.

    The time left is estimated from the mean time of a step in this attempt, including logs, saves
    and evaluations. With `is_quiet`, as on all processes but the main one, it shows nothing.
    """

    def __init__(self, config: TrainerConfig, *, banner: str, is_quiet: bool) -> None:
        self._config = config
        self._banner = banner
        self._is_quiet = is_quiet
        self._bar: tqdm[Any] = tqdm(disable=True)
        self._terminal = ExitStack()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Show what is about to run, and where it starts."""
        self._first_step = trainer.state.optimizer_step
        self._start_s = time.monotonic()
        num_steps = self._config.num_epochs * trainer.loader.plan.steps_per_epoch
        self._num_steps = min(self._config.max_steps or num_steps, num_steps)
        self.write(self._banner)
        if trainer.is_finished and self._first_step:
            self.write(f"this run is finished: nothing left to train after step {self._first_step}")
            return
        if self._first_step:
            epoch = f"epoch {trainer.state.epoch + 1} of {self._config.num_epochs}"
            self.write(
                f"continuing after step {self._first_step}, {epoch}, "
                f"from {checkpoint_name(trainer.state)}"
            )
        if sys.stderr.isatty() and not self._is_quiet:
            # Log messages are printed above the bar.
            self._terminal.enter_context(logging_redirect_tqdm())
            self._bar = tqdm(
                desc=self._epoch(trainer.state.epoch + 1),
                total=self._num_steps,
                initial=self._first_step,
                unit="step",
                smoothing=0,
                bar_format=_FORMAT,
                dynamic_ncols=True,
                file=sys.stderr,
            )
            self._terminal.enter_context(self._bar)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Move the bar."""
        self._bar.set_description_str(self._epoch(report.epoch + 1), refresh=False)
        self._bar.update()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of numbers: on the bar if it is a `train` row, else on a line."""
        numbers = _numbers(row)
        if not numbers:  # a last row with only a picture or a histogram
            return
        step = row["optimizer_step"]
        left = ""
        if row["event"] == "train" and step > self._first_step:
            if not self._bar.disable:
                self._bar.set_postfix_str("  ".join(numbers[:_NUM_ON_BAR]))
                return
            step_s = (time.monotonic() - self._start_s) / (step - self._first_step)
            left = f"{tqdm.format_interval(step_s * (self._num_steps - step))} left"
        line = f"{self._epoch(row['epoch'])}  step {step}/{self._num_steps}  {'  '.join(numbers)}"
        self.write(f"{line}  {left}".rstrip())

    def write(self, text: str) -> None:
        """Show some lines, above the bar if there is one."""
        if not self._is_quiet:
            say(fold(text, terminal_columns()), write=tqdm.write)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Show how it ended."""
        self._terminal.close()
        step = result.position.optimizer_step
        self.write(
            f"{result.state}: {result.stop_reason} at step {step}  "
            f"{'  '.join(_numbers(result.metrics))}"
        )
        if (best := result.best) is not None:
            self.write(f"best: {_short(best.metric)} {best.value:.4f} in {best.name}")

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._terminal.close()

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._config.num_epochs}"


def _numbers(row: Mapping[str, Any]) -> list[str]:
    """Return the numbers of a row with their names, as a person reads them."""
    numbers = {name: value for name, value in row.items() if "/" in name and is_number(value)}
    return [f"{_short(name)} {_number(name, value)}" for name, value in numbers.items()]


def _short(name: str) -> str:
    """Return a name as a person says it: `train/loss` is loss, `eval/accuracy` eval accuracy."""
    group, _, rest = name.partition("/")
    rest = rest.replace("_", " ").replace(" per s", "/s")
    rest = rest.removesuffix(" fraction").removesuffix(" gib")
    return rest if group in ("train", "optim", "perf") else f"{group.replace('_', ' ')} {rest}"


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(("accuracy", "fraction")):
        return f"{100 * value:.2f}%"
    if name.endswith("_gib"):
        return f"{value:.1f} GiB"
    return f"{value:,.0f}" if name.startswith("perf/") else f"{value:.4g}"
