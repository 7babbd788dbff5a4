"""Learning-rate schedules: pure functions of the number of completed optimizer steps.

No state of theirs is in a checkpoint. The curve does not depend on resumes, on the number of
processes or on gradient accumulation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.config import FRACTION, INSIDE_ONE, NOT_NEGATIVE, Config
from ..core.errors import ConfigError
from ..core.learning_rate import Decay, Schedule
from ..core.user_code import describe_error
from ..core.wording import counted


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """The shape of the learning rate over the run.

    Warmup is linear from `peak / warmup_steps`; the shape then spans the remaining steps.
    """

    shape: Literal[
        "constant", "cosine", "exponential", "linear", "polynomial", "step", "triangular", "trunk"
    ] = "cosine"
    """`exponential` takes `gamma` to the power of the step (above 1 it rises, as `accel-trainer
    lr-find` does); `linear` is `polynomial` of power 1; `triangular` rises until `peak_fraction` of
    all steps, then falls; `trunk` is constant until `decay_at`, then falls until the end, and
    `accel-trainer finish` decays from any of its steps."""
    warmup_epochs: float = 0.0
    """Length of the linear warmup in epochs; 0 for none."""
    warmup_steps: int = 0
    """Length of the linear warmup in steps, instead of `warmup_epochs`; 0 for none."""
    min_fraction: float = 0.0
    """Where the decay ends, as a fraction of the peak learning rate (0..1)."""
    power: float = 1.0
    """Exponent of `polynomial`."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Where `step` multiplies by `gamma`, as fractions of the run after warmup."""
    gamma: float = 0.1
    """Factor of `step` at each milestone, and of `exponential` at each step."""
    peak_fraction: float = 0.25
    """Where `triangular` peaks, as a fraction of all steps."""
    decay_at: int | None = None
    """The step after which `trunk` decays; None: never. Until then, the rate does not depend on the
    length of the run (MiniCPM, arXiv 2404.06395; Hägele et al. 2024, arXiv 2405.18392)."""
    decay_shape: Literal["1-sqrt", "linear"] = "1-sqrt"
    """How `trunk` decays: by 1 - the square root of the fraction done, or linearly."""

    def __post_init__(self) -> None:
        NOT_NEGATIVE.check(self, "schedule", "warmup_epochs", "warmup_steps", "power")
        FRACTION.check(self, "schedule", "min_fraction", "peak_fraction")
        (NOT_NEGATIVE if self.shape == "exponential" else FRACTION).check(self, "schedule", "gamma")
        INSIDE_ONE.check(self, "schedule", "milestones")
        NOT_NEGATIVE.check(self, "schedule", "decay_at")
        rises = (self.warmup_epochs, self.warmup_steps, self.shape == "triangular")
        if sum(map(bool, rises)) > 1:
            raise ConfigError(
                "CONFIG",
                "schedule.warmup_epochs, schedule.warmup_steps and triangular with "
                "schedule.peak_fraction each set the warmup: use one of them",
            )
        if self.shape != "trunk" and self.decay_at is not None:
            raise ConfigError(
                "CONFIG",
                f"schedule.decay_at has no effect with {self.shape}: "
                "set --schedule.shape trunk, or leave it out",
            )

    def num_warmup_steps(self, *, total_steps: int, steps_per_epoch: int) -> int:
        """Return the number of steps in which the learning rate rises."""
        if self.shape == "triangular":
            return round(self.peak_fraction * total_steps)
        return self.warmup_steps or round(self.warmup_epochs * steps_per_epoch)

    def decay(self, *, total_steps: int) -> Decay | None:
        """Return where a trunk decays. None: the rate of the shape changes all along."""
        if self.shape != "trunk":
            return None
        return Decay(total_steps if self.decay_at is None else self.decay_at, total_steps)


def build_schedule(
    config: ScheduleConfig,
    *,
    peak_learning_rate: float,
    total_steps: int,
    steps_per_epoch: int,
    decay: Decay | None = None,
) -> Schedule:
    """Return the learning rate as a function of the completed optimizer steps.

    `decay` is where a trunk decays, which may change; None: as the config says.

    Raises:
        ConfigError: the warmup is longer than the run, or a trunk decays in its warmup or after the
            run.
    """
    warmup_steps = config.num_warmup_steps(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    if warmup_steps > total_steps > 0:
        raise ConfigError(
            "CONFIG",
            f"the warmup has {counted(warmup_steps, 'step')}, more than the {total_steps} of the "
            "run: shorten schedule.warmup_epochs or schedule.warmup_steps",
        )
    decay_at = config.decay_at
    if decay_at is not None and total_steps and not warmup_steps <= decay_at < total_steps:
        raise ConfigError(
            "CONFIG",
            f"schedule.decay_at is {decay_at}, but the run has {counted(total_steps, 'step')} and "
            f"a warmup of {warmup_steps}: set it from {warmup_steps} to {total_steps - 1}",
        )
    decay = decay or config.decay(total_steps=total_steps) or Decay(warmup_steps, total_steps)
    floor = config.min_fraction

    def learning_rate_at(optimizer_step: int) -> float:
        if optimizer_step < warmup_steps:
            return peak_learning_rate * (optimizer_step + 1) / warmup_steps
        return peak_learning_rate * (floor + (1 - floor) * _factor(config, decay, optimizer_step))

    return learning_rate_at


def _factor(config: ScheduleConfig, decay: Decay, optimizer_step: int) -> float:
    """Return the factor of `config.shape`, which spans `decay`, after `optimizer_step`.

    The factor falls from 1 to 0, except for `exponential` and `step`.
    """
    progress = min(1.0, decay.fraction_done(optimizer_step))
    if config.shape == "exponential":
        return float(config.gamma ** (optimizer_step - decay.start))
    if config.shape == "step":
        return float(config.gamma ** sum(progress >= milestone for milestone in config.milestones))
    if config.shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if config.shape == "trunk":
        if decay.start == decay.end:
            return 1.0
        return 1 - (progress if config.decay_shape == "linear" else math.sqrt(progress))
    powers = {"constant": 0.0, "polynomial": config.power}
    return float((1 - progress) ** powers.get(config.shape, 1.0))


class TorchSchedule:
    """The learning rates of a torch scheduler as a function of completed optimizer steps."""

    def __init__(
        self,
        factory: Callable[[Optimizer], LRScheduler],
        *,
        learning_rate: float,
        is_by_epoch: bool = False,
    ) -> None:
        self.is_by_epoch = is_by_epoch
        # No scheduler of torch sets this momentum: if it has another one later, it was changed.
        self.stand_in = SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate, momentum=0.123)
        self.scheduler = factory(self.stand_in)
        self._rates: list[float] = []

    def __call__(self, optimizer_step: int, steps_per_epoch: int = 1) -> float:
        """Return the learning rate of the next step."""
        number = optimizer_step // steps_per_epoch if self.is_by_epoch else optimizer_step
        while len(self._rates) <= number:
            if self._rates:
                self.stand_in.step()
                self.scheduler.step()
            self._rates.append(float(self.stand_in.param_groups[0]["lr"]))
        return self._rates[number]


def schedule_from_torch(
    factory: Callable[[Optimizer], LRScheduler],
    *,
    learning_rate: float,
    every: Literal["step", "epoch"] = "step",
) -> Schedule:
    """Return the learning rates of a torch scheduler as a function of completed optimizer steps.

    `factory` gets a stand-in optimizer with `learning_rate`, and returns a scheduler that steps
    once for each optimizer step, or for `every` epoch. Its changes of other settings, such as the
    momentum of OneCycleLR, have no effect.

    Raises ConfigError if `every` is neither.
    """
    if every not in ("step", "epoch"):
        raise ConfigError("SCHEDULE", f"every= is {every!r}: give step or epoch")
    return TorchSchedule(factory, learning_rate=learning_rate, is_by_epoch=every == "epoch")


def checked_schedule(
    schedule: Callable[..., float], *, num_steps: int, steps_per_epoch: int
) -> Schedule:
    """Return a recipe's `schedule`, with floats as learning rates.

    One that takes `steps_per_epoch` gets it. It is tried at the first and the last of `num_steps`
    steps, and checked at each.

    Raises:
        ConfigError: it raises an error there, or returns no number of 0 or more. What it raises at
            a later step is the recipe's own error.
    """
    found = getattr(schedule, "scheduler", schedule)
    if isinstance(found, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "SCHEDULE",
            "torch's ReduceLROnPlateau is not a function of the step: "
            "give callbacks=[accel_trainer.ReduceLROnPlateau(...)]",
        )
    if isinstance(schedule, LRScheduler):
        raise ConfigError(
            "SCHEDULE",
            f"schedule= is torch's {type(schedule).__name__}: "
            "give schedule_from_torch(lambda optimizer: ..., learning_rate=...)",
        )
    if takes_steps_per_epoch(schedule):
        schedule = partial(schedule, steps_per_epoch=steps_per_epoch)

    def rate_at(step: int) -> float:
        rate = schedule(step)
        try:
            rate = float(rate)
        except (TypeError, ValueError) as error:
            raise _failure_at(step, error, num_steps) from error
        if not 0 <= rate < math.inf:
            raise ConfigError(
                "SCHEDULE",
                f"the recipe's schedule returns {rate:g} at step {step}: "
                "return a learning rate of 0 or more",
            )
        return rate

    for step in (0, max(0, num_steps - 1)):
        try:
            rate_at(step)
        except ConfigError:
            raise
        except Exception as error:
            raise _failure_at(step, error, num_steps) from error
    return rate_at


def takes_steps_per_epoch(schedule: Callable[..., float]) -> bool:
    """Return whether a schedule also asks for the number of steps in an epoch."""
    with suppress(TypeError, ValueError):  # a builtin has no signature
        return "steps_per_epoch" in inspect.signature(schedule).parameters
    return False


def _failure_at(step: int, error: Exception, num_steps: int) -> ConfigError:
    return ConfigError(
        "SCHEDULE",
        f"the recipe's schedule fails at step {step} ({describe_error(error)}): "
        f"return a number for each step from 0 to {num_steps - 1}",
    )
