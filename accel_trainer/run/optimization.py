"""The optimizers of a run, its learning rate at every step, and its number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from ..core.batch_plan import BatchPlan
from ..core.config import config_to_dict, diff_config
from ..core.errors import ConfigError
from ..core.learning_rate import Decay, Schedule
from ..core.parameters import Optimizers
from ..core.wording import counted
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import ScheduleConfig, build_schedule, checked_schedule
from ..optim.optimizers import build_optimizer, build_own_optimizers
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
    schedule: Schedule | None,
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
        schedule = checked_schedule(schedule, num_steps=num_steps)
        description = "the recipe's learning rates"
    return Optimization(optimizers, schedule, description, num_steps, decay)


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


def refuse_epochs(config: RecipeConfig, plan: BatchPlan) -> None:
    """Raise ConfigError for settings in epochs if the data is a stream without a length."""
    every = config.trainer.evaluate_every or ""
    in_epochs = {
        "--epochs is {}: set --steps, such as --steps 20000": config.trainer.num_epochs,
        "--evaluate-every is {}: set it in steps, such as 500steps": "epoch" in every and every,
        "--schedule.warmup-epochs is {}: set --schedule.warmup-steps": (
            config.schedule.warmup_epochs
        ),
    }
    for problem, value in in_epochs.items():
        if plan.is_endless and value:
            raise ConfigError(
                "DATA_STREAM",
                f"a stream without a length has no epochs, and {problem.format(value)}",
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
            f" (--max-steps, on the schedule of {total_steps} steps; "
            f"for a schedule of its own: --steps {num_steps})"
        )
    return f"{epochs}{counted(num_steps, 'step')}{stop}"
