"""The optimizers of a run, its learning rate at every step, and its number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks.own_optimizers import check_own_optimizers
from ..core.batch_plan import BatchPlan
from ..core.config import config_to_dict, diff_config
from ..core.errors import ConfigError
from ..core.learning_rate import Decay, Schedule
from ..core.parameters import Optimizers
from ..core.wording import counted, describe_tensor
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import ScheduleConfig, build_schedule, checked_schedule
from ..optim.optimizers import build_optimizer, keep_ratios
from .config import RecipeConfig, with_defaults

BuildOptimizer = Callable[[nn.Module], Optimizer]
"""Builds a recipe's own optimizer of a model."""


@dataclass(frozen=True)
class Optimization:
    """What changes the weights of a run, and for how many steps."""

    optimizers: Optimizers
    """By name; the name of a single one is ""."""
    schedule: Schedule
    description: str
    """The learning rates in a few words, for the banner of the run."""
    num_steps: int
    decay: Decay | None
    """Where a trunk decays; None: the schedule has a different shape."""


def plan_optimization(
    config: RecipeConfig,
    model: nn.Module,
    plan: BatchPlan,
    build_own: BuildOptimizer | Mapping[str, BuildOptimizer] | None,
    schedule: Callable[..., float] | None,
) -> Optimization:
    """Return the recipe's optimizers and schedule, and what it does not build from the config.

    Raises ConfigError.
    """
    _refuse_unused(config, optimizer=build_own is not None, schedule=schedule is not None)
    num_steps = config.trainer.last_step(plan.steps_per_epoch)
    if build_own is None:
        optimizers: Optimizers = {"": build_optimizer(model, config.optimizer)}
    else:
        optimizers = build_own_optimizers(
            build_own if isinstance(build_own, Mapping) else {"": build_own}, model
        )
        learning_rate = float(next(iter(optimizers.values())).param_groups[0]["lr"])
        config = replace(config, optimizer=OptimizerConfig(learning_rate=learning_rate))
    decay = config.schedule.decay(total_steps=config.trainer.total_steps(plan.steps_per_epoch))
    if schedule is None:
        peak_learning_rate, schedule = plan_learning_rate(config, plan, decay)
        description = f"peak learning rate {peak_learning_rate:g}"
    else:
        schedule = checked_schedule(
            schedule, num_steps=num_steps, steps_per_epoch=plan.steps_per_epoch
        )
        description = "the recipe's learning rates"
    return Optimization(optimizers, schedule, description, num_steps, decay)


def build_own_optimizers(builders: Mapping[str, BuildOptimizer], model: nn.Module) -> Optimizers:
    """Return the optimizers that a recipe builds for `model`, by name. Raises ConfigError."""
    optimizers = {name: _build_own(build, model) for name, build in builders.items()}
    check_own_optimizers(optimizers, model)
    keep_ratios(optimizers)
    return optimizers


def _build_own(build: BuildOptimizer, model: nn.Module) -> Optimizer:
    is_function = callable(build) and build not in vars(torch.optim).values()
    optimizer = build(model) if is_function else build
    if not is_function or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "CONFIG",
            f"optimizer= {'returns' if is_function else 'is'} {describe_tensor(optimizer)}: pass a "
            "function that takes the model and returns a torch optimizer, such as lambda model: "
            "torch.optim.Adam(model.parameters()), or name one in OptimizerConfig(name=)",
        )
    return optimizer


def _refuse_unused(config: RecipeConfig, *, optimizer: bool, schedule: bool) -> None:
    """Raise ConfigError for settings of an optimizer or schedule that the recipe builds itself."""
    default = config
    if optimizer:
        default = replace(config, optimizer=OptimizerConfig(freeze=config.optimizer.freeze))
    if schedule:
        rates = replace(default.optimizer, learning_rate=None, learning_rate_scaling="none")
        default = replace(default, optimizer=rates, schedule=ScheduleConfig())
    if unused := diff_config(config_to_dict(with_defaults(default)), config_to_dict(config)):
        built = "the optimizer" if optimizer else "a schedule"
        raise ConfigError(
            "CONFIG",
            f"{unused[0][0]} has no effect: the recipe sets {built} itself: "
            "leave it out, or change the recipe",
        )


def plan_learning_rate(
    config: RecipeConfig, plan: BatchPlan, decay: Decay | None = None
) -> tuple[float, Schedule]:
    """Return the peak learning rate, scaled to the global batch, and the schedule with it.

    `decay` is where a trunk decays, which may change; None: as the config says.
    """
    peak_learning_rate = config.optimizer.peak_learning_rate(
        global_batch_size=plan.global_batch_size
    )
    schedule = build_schedule(
        config.schedule,
        peak_learning_rate=peak_learning_rate,
        total_steps=config.trainer.total_steps(plan.steps_per_epoch),
        steps_per_epoch=plan.steps_per_epoch,
        decay=decay,
    )
    return peak_learning_rate, schedule


def describe_length(config: RecipeConfig, plan: BatchPlan) -> str:
    """Return the epochs and steps of the whole run, for its banner."""
    num_epochs = config.trainer.num_epochs
    if config.trainer.hours is not None:
        return f"as many steps as {config.trainer.hours:g} hours allow"
    num_steps = config.trainer.last_step(plan.steps_per_epoch)
    total_steps = config.trainer.total_steps(plan.steps_per_epoch)
    epochs = "" if num_epochs is None else f"{counted(num_epochs, 'epoch')}, "
    stop = " (--max-steps)" * (num_steps < total_steps)
    if 2 * num_steps < total_steps:
        stop = (
            f" (--max-steps, on the schedule of {counted(total_steps, 'step')}; "
            f"for a schedule of its own: --steps {num_steps})"
        )
    return f"{epochs}{counted(num_steps, 'step')}{stop}"
