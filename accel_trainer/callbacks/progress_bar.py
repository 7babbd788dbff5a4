"""Shows the progress of a run: a table above a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..core.batch_plan import ENDLESS
from ..core.history import is_number
from ..core.timing import is_long_wait
from ..core.train_state import checkpoint_name
from ..core.types import StepReport
from ..core.wording import counted
from ..distributed.launch_env import count_local_processes
from ..distributed.machine import available_cpus
from ..training.callback import Callback, RunResult, TrainerView
from ..training.config import TrainerConfig
from .console import say, terminal_columns, wrap_lines
from .metrics_file import Row

# The loss stands before the speed: tqdm cuts off what does not fit on a narrow terminal.
_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt}  {remaining} left{postfix}  {rate_fmt}"
_NUM_FIRST = 3  # steps, which allocate, compile and are checked
_MEASURED_S = 10.0
_MIN_LEFT_S = 120.0  # of what is worth a line
_MIN_WIDTH = 10  # of a column, for a number such as -1.234e-05


@dataclass(eq=False)
class ProgressBar(Callback):
    """Shows rows of numbers (`show` is a sink of `MetricLogger`), the steps, and the time left.

    On a terminal, a table has a row for each evaluation and each epoch. The bar has the loss of
    a recent step, of the samples of this process.

    The time left is estimated from the mean time of a step in this attempt, including logs, saves
    and evaluations. Once the first steps are over, one line says what all take, unless that is
    short, and another one if they wait for samples and more data workers would help. With
    `is_quiet`, as on all processes but the main one, it shows nothing.
    """

    config: TrainerConfig
    _: KW_ONLY
    banner: str
    is_quiet: bool

    def __post_init__(self) -> None:
        self._bar: tqdm[Any] = tqdm(disable=True)
        self._terminal = ExitStack()
        self._loss = ""  # of the last `train` row, if the table does not have it yet
        self._head = ""
        self._timed_from_s = math.inf  # until the first steps are over, and once the time is said

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Show what is about to run, and where it starts."""
        self._trainer = trainer
        self._best = trainer.best
        self._first_step = trainer.state.optimizer_step
        self._start_s = time.monotonic()
        self._num_steps = self.config.last_step(trainer.loader.plan.steps_per_epoch)
        self._of = "" if self._num_steps == ENDLESS else f"/{self._num_steps}"
        self.write(self.banner)
        if trainer.is_finished and self._first_step:
            self.write(f"this run is finished: nothing left to train after step {self._first_step}")
            return
        if self._first_step:
            self.write(
                f"continuing after step {self._first_step}, "
                f"{self._epoch(trainer.state.epoch + 1)}, from {checkpoint_name(trainer.state)}"
            )
        if self.is_quiet:
            return
        if sys.stderr and sys.stderr.isatty() and terminal_columns():
            # Log messages are printed above the bar.
            self._terminal.enter_context(logging_redirect_tqdm())
            self._bar = tqdm(
                desc=self._epoch(trainer.state.epoch + 1),
                total=self._num_steps if self._of else None,
                initial=self._first_step,
                unit="step",
                smoothing=0,
                bar_format=_FORMAT,
                # The loss is read whenever the bar is drawn, and waits for an accelerator.
                mininterval=0.1 if trainer.accelerator.device.type == "cpu" else 2.0,
                dynamic_ncols=True,
                file=sys.stderr,
            )
            self._terminal.enter_context(self._bar)
            self.write("Ctrl-C saves a checkpoint, and the same command continues from it")

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Move the bar. **Host sync** when it is drawn."""
        self._tell_time(trainer, report.optimizer_step)
        self._bar.set_description_str(self._epoch(report.epoch + 1), refresh=False)
        if self._bar.update():  # it was drawn
            loss = loss_of(report, is_exact=trainer.loader.plan.reduce == "exact")
            self._bar.set_postfix_str(f"loss {loss:.4g}")

    def _tell_time(self, trainer: TrainerView, step: int) -> None:
        """Say what the remaining steps take as soon as enough were timed, once."""
        timed, now_s = step - self._first_step - _NUM_FIRST, time.monotonic()
        if timed == 0:
            self._timed_from_s = now_s
            self._waited_s = trainer.data_wait_s
        elif (spent_s := now_s - self._timed_from_s) >= _MEASURED_S:
            self._timed_from_s = math.inf
            num_left = self._num_steps - step
            left_s = spent_s / timed * num_left
            if self._of and left_s >= _MIN_LEFT_S:
                self.write(
                    f"about {tqdm.format_interval(left_s)} for {counted(num_left, 'more step')}, "
                    "evaluations and checkpoints not included"
                )
            self._tell_wait(trainer, spent_s, timed)

    def _tell_wait(self, trainer: TrainerView, spent_s: float, num_steps: int) -> None:
        """Say what would help if steps wait for a reader that could have more workers."""
        wait_s = trainer.data_wait_s - self._waited_s
        cpus = available_cpus() // count_local_processes()
        num_workers: int = getattr(getattr(trainer.loader, "reader", None), "num_workers", cpus)
        more = min(cpus, max(2, 2 * num_workers))
        if is_long_wait(wait_s, spent_s, num_steps) and more > num_workers:
            self.write(
                f"{wait_s:.1f} of {spent_s:.1f} s of training wait for samples: "
                f"--num-workers {more}"
            )

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the epoch to the table if no evaluation has."""
        if self._loss:
            self._add_row({})

    def show(self, row: Row) -> None:
        """Show a row of numbers: on a line, or on a terminal in the table.

        There, a `train` row waits for the next evaluation or the end of its epoch.
        """
        numbers = _numbers(row)
        if not numbers:  # a last row with only a picture
            return
        step = row["optimizer_step"]
        left = ""
        if row["event"] == "train" and step > self._first_step:
            if not self._bar.disable:
                self._loss = numbers.get("loss", "")
                self._bar.set_postfix_str(f"loss {self._loss}")
                return
            step_s = (time.monotonic() - self._start_s) / (step - self._first_step)
            left_s = step_s * (self._num_steps - step)
            left = f"{tqdm.format_interval(left_s)} left" if self._of else ""
        elif row["event"] == "eval" and not self._bar.disable:
            self._add_row(numbers)
            return
        line = f"{self._epoch(row['epoch'])}  step {step}{self._of}  {_join(numbers)}"
        self.write(f"{line}  {left}".rstrip())

    def _add_row(self, evaluation: Mapping[str, str]) -> None:
        """Print an evaluation beside the last training loss, in the columns that fit.

        A `*` marks the best evaluation so far.
        """
        trainer = self._trainer
        state = trainer.state
        epochs = state.epoch + state.step_in_epoch / trainer.loader.plan.steps_per_epoch
        mark = "" if trainer.best is self._best else "*"
        head = "epoch"
        line = f"{mark:1}{round(epochs, 2):>4g}"
        if self.config.num_steps is not None:
            head = f"{'step':>9}"
            line = f"{mark:1}{state.optimizer_step:>8}"
        for name, text in {"loss": self._loss, **evaluation}.items():
            width = max(len(name), _MIN_WIDTH)
            if len(head) + 2 + width <= (terminal_columns() or 0):
                head += f"  {name:>{width}}"
                line += f"  {text:>{width}}"
        if not self._head.startswith(head):
            self._head = head
            line = f"{head}\n{line}"
        self.write(line)
        self._best = trainer.best
        self._loss = ""

    def write(self, text: str) -> None:
        """Show some lines, above the bar if there is one."""
        if not self.is_quiet:
            say(wrap_lines(text, terminal_columns()), write=tqdm.write)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Show how it ended."""
        self._terminal.close()
        reason = result.stop_reason
        position = result.position
        took = tqdm.format_interval(time.monotonic() - self._start_s)
        limits = {
            "num_epochs reached": counted(position.epoch, "epoch"),
            "num_steps reached": "--steps",
            "max_steps reached": "--max-steps",
            "hours reached": "--hours",
        }
        self.write(
            f"{reason}: saved step {position.optimizer_step}: run the same command to continue"
            if result.state == "preempted"
            else f"{result.state}: {counted(position.optimizer_step, 'step')} "
            f"({limits.get(reason, reason)}) in {took}  {_join(_numbers(result.metrics))}"
        )
        if (best := result.best) is not None:
            self.write(
                f"best: {_short(best.metric)} {_number(best.metric, best.value)} in {best.name}"
            )

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._terminal.close()

    def _epoch(self, epoch: int) -> str:
        num_epochs = self.config.num_epochs
        return f"epoch {epoch}" if num_epochs is None else f"epoch {epoch}/{num_epochs}"


def loss_of(report: StepReport, *, is_exact: bool) -> float:
    """Return the mean loss of this process's samples in a step. **Host sync.**"""
    count: Any = report.num_items
    if count is None:
        count = report.num_samples if is_exact else sum(map(len, report.sample_ids))
    return float(report.loss_sum / count)


def _numbers(row: Row) -> dict[str, str]:
    """Return the numbers of a row by name, both as a person reads them; the report shows memory."""
    return {
        _short(name): _number(name, value)
        for name, value in row.items()
        if "/" in name and is_number(value) and not name.endswith("_gib")
    }


def _join(numbers: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {text}" for name, text in numbers.items())


def _short(name: str) -> str:
    """Return a name as a person says it: `train/loss` is loss, `eval/accuracy` eval accuracy."""
    group, _, rest = name.partition("/")
    rest = rest.replace("_", " ").replace(" per s", "/s").removesuffix(" fraction")
    return rest if group in ("train", "optim", "perf") else f"{group.replace('_', ' ')} {rest}"


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(("accuracy", "fraction")):
        return f"{100 * value:.2f}%"
    return f"{value:,.0f}" if name.startswith("perf/") else f"{value:.4g}"
