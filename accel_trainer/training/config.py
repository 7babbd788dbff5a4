"""How long a run trains, and when it evaluates and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal

from ..core.batch_plan import ENDLESS
from ..core.config import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    INSIDE_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Config,
    short_flag,
)
from ..core.errors import ConfigError
from ..core.train_state import Mode, TrainState, Weights

_INTERVAL = re.compile(r"(?P<number>\d+|\d*\.\d+) ?(?P<unit>step|epoch)s?")

RESTARTS_EPOCH = frozenset(
    {"seed", "data", "batch.global_batch_size", "batch.drop_last", "batch.order"}
)
"""Settings that decide which samples a step has: changing one on a resume restarts the epoch in
progress."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """How long to train, and when to evaluate and log."""

    num_epochs: Annotated[int | None, short_flag("--epochs")] = None
    """Passes over the training data; None: 10, unless `num_steps` is set. The learning rate
    schedule covers all of them, even if the run stops earlier."""
    num_steps: Annotated[int | None, short_flag("--steps")] = None
    """Optimizer steps of the whole run, instead of `num_epochs`; the schedule covers them."""
    hours: Annotated[float | None, short_flag("--hours")] = None
    """Hours of the whole run, instead of `num_epochs`, with `--schedule.shape trunk`: the run
    decides once at which step to begin its decay, so that it ends in time."""
    max_steps: Annotated[int | None, short_flag("--max-steps")] = None
    """Stop after this optimizer step, without changing the schedule; None: train to the end."""
    max_time_s: float | None = None
    """Stop after this many seconds; the same command continues the run. None: no limit."""
    max_grad_norm: float | None = None
    """Clip gradients to this global L2 norm, and log the norm; None: neither."""
    max_grad_value: float | None = None
    """Clip each gradient to this absolute value, and log their norm before that; None: neither."""
    on_nonfinite: Annotated[Literal["stop", "skip"], short_flag("--on-nonfinite")] = "stop"
    """When a gradient is NaN or inf, which is never applied: end the run, or skip the step."""
    ema_decay: Annotated[float | None, short_flag("--ema")] = None
    """Keep, evaluate and export an exponential moving average of the weights with this decay; None:
    none."""
    ema_every_n_steps: int = 1
    """Move the average after every n steps."""
    ema_warmup_steps: int = 0
    """For this many steps, the average is a copy of the weights."""
    evaluate_every: Annotated[str | None, short_flag("--evaluate-every")] = None
    """How often to evaluate, such as `500steps`, `2epochs` or `0.25epochs`, also at the end; None:
    `1epoch`, or `1000steps` with `num_steps`."""
    monitor: str | None = None
    """The metric that decides which evaluation is best, such as `eval/accuracy`; None: the accuracy
    if there is one, else the first number in `higher_is_better`; with EMA, that of the averaged
    weights."""
    monitor_mode: Mode | None = None
    """Whether a larger or a smaller `monitor` is better; None: as the metric declares."""
    patience: int | None = None
    """Stop after this many evaluations without improvement; None: never."""
    log_every_n_steps: int = 50
    """Write a row of training numbers every n optimizer steps, and at the end of each epoch."""
    digest_every_n_steps: int | None = 200
    """Add digests of the weights, the optimizer and the samples so far to the first row after every
    n optimizer steps; None: none."""
    check_every_n_steps: Annotated[int | None, short_flag("--check-every")] = None
    """Compute every n-th step twice before its update, and end the run if the bits differ;
    None: none."""

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check(
            self,
            "trainer",
            "max_steps",
            "ema_every_n_steps",
            "log_every_n_steps",
            "digest_every_n_steps",
            "check_every_n_steps",
            "patience",
        )
        ABOVE_ZERO.check(self, "trainer", "max_grad_norm", "max_grad_value", "max_time_s")
        if self.evaluate_every is not None:
            _interval(self.evaluate_every)  # raises ConfigError
        NOT_NEGATIVE.check(self, "trainer", "num_epochs", "num_steps", "ema_warmup_steps")
        POSITIVE.check(self, "trainer", "hours")
        lengths = {"--epochs": self.num_epochs, "--steps": self.num_steps, "--hours": self.hours}
        given = [f"{flag} {value}" for flag, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                "CONFIG",
                f"{given[0]} and {given[1]} both set the length of the run: "
                "leave one of them out, or set it to None",
            )
        INSIDE_ONE.check(self, "trainer", "ema_decay")

    @property
    def last_weights(self) -> Weights:
        """The weights of the last step that count: the average, if there is one."""
        return "model" if self.ema_decay is None else "ema"

    def with_defaults(self) -> TrainerConfig:
        """Return the config with its length and its evaluations filled in, as a run stores it."""
        by_steps = self.num_steps is not None
        has_length = by_steps or self.hours is not None
        num_epochs = 10 if self.num_epochs is None and not has_length else self.num_epochs
        every = "1000steps" if by_steps else "1epoch"
        return replace(self, num_epochs=num_epochs, evaluate_every=self.evaluate_every or every)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps that the schedule covers: all that there are, with `hours`."""
        if self.hours is not None:
            return ENDLESS
        if self.num_steps is not None:
            return self.num_steps
        return (self.num_epochs or 0) * steps_per_epoch

    def last_step(self, steps_per_epoch: int) -> int:
        """Return the optimizer step with which the run ends: its last one, or `max_steps`."""
        whole = self.total_steps(steps_per_epoch)
        return min(whole, self.max_steps or whole)

    def evaluates_after(self, state: TrainState, steps_per_epoch: int) -> bool:
        """Whether the run evaluates at `state`, where it has trained at least one step.

        At the end of an epoch, that is the state with all its steps, before the next epoch.
        """
        numerator, denominator, unit = _interval(self.evaluate_every or "1epoch")
        step = state.optimizer_step
        if unit == "epoch":
            step = state.epoch * steps_per_epoch + state.step_in_epoch
            numerator *= steps_per_epoch
        is_epoch_end = state.step_in_epoch == steps_per_epoch
        is_last = state.optimizer_step == self.num_steps or (
            is_epoch_end and state.epoch + 1 == self.num_epochs
        )
        # A multiple of the interval lies at this step, or between it and the one before.
        return is_last or step * denominator % numerator < denominator


@cache
def _interval(text: str) -> tuple[int, int, str]:
    """Return the number in a text such as `0.5epochs`, as a fraction of two integers, and its unit.

    Raises ConfigError for any other text.
    """
    found = _INTERVAL.fullmatch(str(text))
    number = Fraction(found["number"]) if found else Fraction(0)
    if found is None or number == 0 or (number.denominator > 1 and found["unit"] == "step"):
        raise ConfigError(
            "CONFIG",
            f"--evaluate-every is {text!r}: "
            "set it to some steps or epochs, such as 500steps or 0.5epochs",
        )
    return number.numerator, number.denominator, found["unit"]
