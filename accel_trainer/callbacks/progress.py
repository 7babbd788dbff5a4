"""What a person sees while a run goes on: one bar on a terminal, plain lines elsewhere, on the main process only."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..checkpoint_files import checkpoint_name
from ..console import say
from ..metrics import is_number
from ..runtime import peak_memory_bytes
from ..types import StepReport
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer


_BAR = "{desc} |{bar:16}| {n_fmt}/{total_fmt}{postfix}"  # a narrow terminal cuts off its end


class Progress(Callback):
    """Shows rows of numbers as they come (`show` is a sink of `MetricsLog`), how far the run is, and what is left.

    The time left is that of this attempt's steps, with their logs and saves, for the steps that are left, and that of
    its evaluations for those; before the first of them, it is left out.
    """

    def __init__(self, *, banner: str, is_quiet: bool = False) -> None:
        self._banner, self._is_quiet = banner, is_quiet
        self._bar: tqdm[Any] | None = None
        self._terminal = ExitStack()
        self._num_evaluations = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Show what is about to happen, and from where."""
        self._trainer, self._first_step = trainer, trainer.state.optimizer_step
        self._start_s = time.monotonic()
        self._num_epochs, steps_per_epoch = trainer.config.num_epochs, trainer.loader.plan.steps_per_epoch
        self._num_steps = min(trainer.config.max_steps or sys.maxsize, self._num_epochs * steps_per_epoch)
        self.tell(self._banner)
        if trainer.is_finished and self._first_step:
            self.tell(f"this run is finished: nothing left to train after step {self._first_step}")
            return
        if self._first_step:
            where = f"after step {self._first_step}, epoch {trainer.state.epoch + 1} of {self._num_epochs}"
            self.tell(f"continuing {where}, from {checkpoint_name(trainer.state)}")
        if sys.stderr.isatty() and not self._is_quiet:
            self._terminal.enter_context(logging_redirect_tqdm())  # a warning gets a line of its own
            self._bar = tqdm(
                total=self._num_steps,
                initial=self._first_step,
                bar_format=_BAR,
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Count it: the time left includes those to come."""
        self._num_evaluations += 1

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of numbers."""
        if self._is_quiet:
            return
        epoch = f"epoch {row['epoch']}/{self._num_epochs}"
        numbers = [f"{_short(name)} {_number(name, value)}" for name, value in row.items() if "/" in name]
        left = ""
        if row["event"] == "train" and row["optimizer_step"] > self._first_step:
            numbers += [f"memory {peak_memory_bytes(self._trainer.accelerator) / 2**30:.1f} GiB"]
            left = f"{tqdm.format_interval(self._left_s(row['optimizer_step']))} left"
        if self._bar is not None and left:
            self._bar.set_description_str(epoch, refresh=False)
            self._bar.set_postfix_str("  ".join([left, *numbers]))
        else:
            self.tell("  ".join([epoch, f"step {row['optimizer_step']}/{self._num_steps}", *numbers, left]).rstrip())

    def tell(self, text: str) -> None:
        """Show some lines, above the bar if there is one."""
        if self._bar is not None:
            say(text, write=self._bar.write)
        elif not self._is_quiet:
            say(text)

    def _left_s(self, optimizer_step: int) -> float:
        config, steps_per_epoch = self._trainer.config, self._trainer.loader.plan.steps_per_epoch
        period = config.evaluate_every_n_epochs * steps_per_epoch
        return estimate_left_s(
            time.monotonic() - self._start_s,
            evaluation_s=self._trainer.watchdog.phase_s.get("evaluation", 0.0),
            steps=(optimizer_step - self._first_step, self._num_steps - optimizer_step),
            evaluations=(self._num_evaluations, -(-self._num_steps // period) - optimizer_step // period),
        )

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Show how it ended."""
        self._close()
        numbers = "  ".join(
            f"{_short(name)} {_number(name, value)}" for name, value in result.metrics.items() if is_number(value)
        )
        self.tell(f"{result.state}: {result.stop_reason} at step {result.position.optimizer_step}  {numbers}")
        if result.best is not None:
            self.tell(f"best: {_short(result.best.metric)} {result.best.value:.4f} in {result.best.name}")

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._terminal.close()


def estimate_left_s(
    elapsed_s: float, *, evaluation_s: float, steps: tuple[int, int], evaluations: tuple[int, int]
) -> float:
    """Return the time left by the time so far; `steps` and `evaluations` are those done in it and those left."""
    step_s = (elapsed_s - evaluation_s) / steps[0]
    return step_s * steps[1] + evaluation_s / max(1, evaluations[0]) * evaluations[1]


def _short(name: str) -> str:
    """Return the name as a person says it: `train/loss` is loss, `eval/accuracy` eval accuracy."""
    group, _, rest = name.partition("/")
    rest = rest.replace("_", " ").replace(" per s", "/s").removesuffix(" fraction")
    return rest if group in ("train", "optim", "perf") else f"{group.replace('_', ' ')} {rest}"


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(("accuracy", "fraction")):
        return f"{100 * value:.2f}%"
    return f"{value:,.0f}" if name.startswith("perf/") else f"{value:.4g}"
