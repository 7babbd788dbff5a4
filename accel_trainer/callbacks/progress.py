"""What a person sees while a run goes on: one bar on a terminal, plain lines elsewhere, on the main process only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..types import StepReport
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer


class Progress(Callback):
    """Shows rows of numbers as they come (`show` is a sink of `MetricsLog`) and how far the run is."""

    def __init__(self, *, banner: str, is_quiet: bool = False) -> None:
        self._banner, self._is_quiet = banner, is_quiet
        self._bar: tqdm[Any] | None = None
        self._was_finished = False
        self._num_steps, self._num_epochs = 0, 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Show what is about to happen, and from where."""
        if self._is_quiet:
            return
        state, steps_per_epoch = trainer.state, trainer.loader.plan.steps_per_epoch
        self._num_epochs = trainer.config.num_epochs
        self._num_steps = min(trainer.config.max_steps or sys.maxsize, self._num_epochs * steps_per_epoch)
        print(self._banner)
        self._was_finished = trainer.is_finished and state.optimizer_step > 0
        if self._was_finished:
            print(f"this run is finished: nothing left to train after step {state.optimizer_step}")
        elif state.optimizer_step:
            print(
                f"continuing after step {state.optimizer_step}, epoch {state.epoch + 1} of {self._num_epochs}"
            )
        if sys.stderr.isatty() and not self._was_finished:
            self._bar = tqdm(
                total=self._num_steps,
                initial=state.optimizer_step,
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of numbers."""
        if self._is_quiet:
            return
        epoch = f"epoch {row['epoch']}/{self._num_epochs}"
        numbers = "  ".join(
            f"{_short(name)} {_number(name, value)}" for name, value in row.items() if "/" in name
        )
        if self._bar is None:
            print(f"{epoch}  step {row['optimizer_step']}/{self._num_steps}  {numbers}", flush=True)
        elif row["event"] == "eval":
            self._bar.write(f"{epoch}  {numbers}")
        else:
            self._bar.set_description(epoch, refresh=False)
            self._bar.set_postfix_str(numbers)

    def tell(self, text: str) -> None:
        """Show some lines."""
        if not self._is_quiet:
            print(text, flush=True)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Show how it ended."""
        self._close()
        if self._is_quiet:
            return
        numbers = "  ".join(
            f"{_short(name)} {_number(name, value)}"
            for name, value in result.metrics.items()
            if isinstance(value, float)
        )
        print(f"{result.state}: {result.stop_reason} at step {result.position.optimizer_step}  {numbers}")
        if result.best is not None:
            print(f"best: {_short(result.best.metric)} {result.best.value:.4f} in {result.best.name}")

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(name: str) -> str:
    """Return the name as a person says it: `train/loss` is loss, `eval/accuracy` eval accuracy."""
    group, _, rest = name.partition("/")
    rest = rest.replace("_", " ").replace(" per s", "/s").removesuffix(" fraction")
    return rest if group in ("train", "optim", "perf") else f"{group.replace('_', ' ')} {rest}"


def _number(name: str, value: Any) -> str:
    if name.endswith(("accuracy", "fraction")):
        return f"{100 * value:.2f}%"
    return f"{value:,.0f}" if name.startswith("perf/") else f"{value:.4g}"
