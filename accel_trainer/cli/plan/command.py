"""`accel-trainer plan [RECIPE.py] [its flags]`: estimate a run's time and memory.

It prints the batches, steps and learning rates, and the steps after which the run evaluates and
saves. It also trains the recipe for a few seconds to estimate how much memory and time the whole
run will need on this machine, and deletes the result.

With `--schedule.shape trunk --hours H`, it shows what the run would decide at this speed: the step
after which it decays, and its last one.

example: accel-trainer plan recipes/cifar.py --config recipes/configs/digits.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.wording import counted
from ...distributed.accelerator import uses_cpu
from ...distributed.machine import available_cpus
from ...removed import refuse_removed_command
from ...run.config import RecipeConfig
from ...run.keywords import with_values
from ..common.output import format_duration, show
from ..common.parser import CommandParser, at_least
from ..common.recipes import find_config_class
from ..flags.parser import parse_config
from ..recipe.hours import DECAY, check_hours
from .measure import Measured, TrialFailed, measure
from .steps import RunPlan, plan_run, without_open_settings
from .timer import NUM_FIRST_STEPS

_NUM_ROWS = 10
_HOUR_S = 3600


def main(argv: Sequence[str]) -> int:
    """Print the plan. The exit code is that of the recipe if it fails."""
    parser = CommandParser(__doc__)
    processes_help = "processes to plan for; default: 1"
    parser.add_number("--num-processes", processes_help, default=1, lowest=1)
    samples_help = "plan for this many training samples, without measuring"
    parser.add_number("--num-samples", samples_help)
    parser.add_argument(
        "--seconds",
        type=at_least(0, float),
        metavar="S",
        default=12,
        help="how long to measure, after the first steps; default: 12",
    )
    options, recipe, flags = parser.parse_recipe(argv)
    can_measure = options.num_processes <= _num_devices()
    config_class = RecipeConfig if recipe is None else find_config_class(recipe)
    config = parse_config(config_class, flags, description=__doc__)
    hours = config.trainer.hours
    if hours is not None:
        _check_hours(config, options, can_measure=can_measure)
        config = with_values(config, {"trainer.hours": None})
    if options.num_samples is not None:
        config = without_open_settings(config, options.num_samples, options.num_processes)
        batch = config.batch.plan(options.num_samples, num_processes=options.num_processes)
        show("\n".join(describe(plan_run(config, batch))))
        return 0
    if recipe is None:
        raise ConfigError(
            "PLAN", "a plan without a recipe does not know the data: add --num-samples"
        )
    try:
        measured = measure(
            recipe,
            flags,
            num_processes=options.num_processes if can_measure else 1,
            seconds=options.seconds if can_measure else 0,
        )
    except TrialFailed as failure:
        return failure.exit_code
    batch = measured.batch
    config = without_open_settings(config, batch.num_samples, options.num_processes)
    if not can_measure:
        batch = config.batch.plan(batch.num_samples, num_processes=options.num_processes)
    plan = plan_run(config, batch)
    if can_measure and hours is not None:
        plan = plan_run(_decided(measured, plan, hours), batch)
    lines = [*describe(plan), ""]
    if can_measure:
        lines += _describe_costs(measured, plan)
    else:
        lines.append(
            f"its time and memory are not known: {options.num_processes} processes are more than "
            f"the {_num_devices()} that this machine can run"
        )
    show("\n".join(lines))
    return 0


def _check_hours(config: RecipeConfig, options: Any, *, can_measure: bool) -> None:
    """Raise ConfigError if `--hours` of a recipe cannot be planned, as it needs measured steps."""
    if config.schedule.shape != "trunk":
        refuse_removed_command("plan", ["--hours"])
    check_hours(config)
    if options.num_samples is not None or not can_measure:
        raise ConfigError(
            "PLAN",
            "--hours decides by measured steps, and this plan measures none: leave --num-samples "
            f"out, and plan for at most {_num_devices()} processes",
        )


def _num_devices() -> int:
    """Return the number of processes that can train here, each on a GPU or a CPU core."""
    return available_cpus() if uses_cpu() else torch.accelerator.device_count()


# --- what was measured ---


def _describe_costs(measured: Measured, plan: RunPlan) -> list[str]:
    """Return the time and the memory of the whole run as lines of text."""
    times = measured.times
    costs = measured.costs(plan)
    num_times = {
        "training": f"{plan.num_steps:,} steps of {_seconds(measured.step_s)}",
        "evaluation": f"{len(plan.evaluation_steps):,} of {_seconds(times.evaluation_s)}",
        "checkpoints": f"{len(plan.save_steps):,} of {_seconds(measured.save_s)}",
    }
    rows = [(name, _seconds(costs[name]), num_times.get(name, "")) for name in costs]
    where = "peak of the process" if times.device == "cpu" else f"peak on {times.device}"
    rows.append(("the whole run", _seconds(sum(costs.values())), ""))
    rows.append(("memory", f"{times.peak_memory_bytes / 2**30:.2f} GiB", where))
    steps = f"{times.num_steps:,} steps after the first {NUM_FIRST_STEPS}"
    samples = f"{times.num_evaluated:,} samples of evaluation"
    return [
        f"here, by {steps} and {samples}, in {_seconds(measured.total_s)}:",
        *(f"{name:<13}  {value:>11}  {note}".rstrip() for name, value, note in rows),
    ]


def _decided(measured: Measured, plan: RunPlan, hours: float) -> RecipeConfig:
    """Return the config with what a run of some hours decides if its steps take what was measured.

    `plan` is of a run of any length.
    """
    left_s = hours * _HOUR_S - measured.once_s
    num_steps = max(2, int(left_s / measured.repeated_s(plan)))
    length = {"trainer.num_epochs": None, "trainer.num_steps": num_steps}
    decay = {"schedule.decay_at": int(num_steps / (1 + DECAY))}
    return with_values(plan.config, {**length, **decay})


def _seconds(seconds: float) -> str:
    """Return a time with about three digits."""
    if seconds >= 10:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# --- what the run does ---


def describe(plan: RunPlan) -> list[str]:
    """Return the plan as lines of text."""
    batch = plan.batch
    trainer = plan.config.trainer
    optimizer = plan.config.optimizer.with_defaults()
    last = batch.step_batch_size(batch.steps_per_epoch - 1)
    stop = "" if plan.num_steps == trainer.total_steps(batch.steps_per_epoch) else " (--max-steps)"
    ratio = f"{batch.global_batch_size}/{optimizer.base_batch_size}"
    if optimizer.learning_rate_scaling == "none":
        scaling = ""
    elif optimizer.learning_rate_scaling == "linear":
        scaling = f" = {optimizer.learning_rate:g} x {ratio}"
    else:
        scaling = f" = {optimizer.learning_rate:g} x sqrt({ratio})"
    lines = [batch.describe()]
    if last != batch.global_batch_size:
        lines.append(f"the last step of an epoch has {counted(last, 'sample')}")
    epochs = "" if trainer.num_epochs is None else f"{counted(trainer.num_epochs, 'epoch')}, "
    lines.append(f"{epochs}{counted(plan.num_steps, 'step')}{stop}")
    lines.append(f"peak learning rate {plan.peak_learning_rate:g}{scaling}, {_warmup(plan)}")
    if plan.config.schedule.decay_at is not None:
        lines[-1] += f", decays after step {plan.config.schedule.decay_at:,}"
    lines.append("")
    lines.append(f"{'step':>9}  {'epoch':>7}  {'learning rate':>13}")
    lines += _curve(plan)
    lines.append("")
    lines.append(f"evaluates after step {_listed(plan.evaluation_steps)}")
    lines.append(f"saves after step {_listed(plan.save_steps)}, and after each best evaluation")
    return lines


def _warmup(plan: RunPlan) -> str:
    if not plan.warmup_steps:
        return "no warmup"
    epochs = plan.warmup_steps / plan.batch.steps_per_epoch
    return f"warmup ends with step {plan.warmup_steps} (epoch {epochs:.2f})"


def _curve(plan: RunPlan) -> list[str]:
    """Return rows with the learning rate at about ten steps."""
    evenly_spaced = {round(plan.num_steps * row / _NUM_ROWS) for row in range(_NUM_ROWS + 1)}
    steps = {1, plan.warmup_steps} | evenly_spaced
    rows = []
    for step in sorted(step for step in steps if 1 <= step <= plan.num_steps):
        learning_rate = plan.learning_rate_at(step - 1)
        epoch = step / plan.batch.steps_per_epoch
        rows.append(f"{step:>9,}  {epoch:>7.2f}  {learning_rate:>13.4g}")
    return rows


def _listed(steps: Sequence[int]) -> str:
    """Return the steps as text: all of up to six, else the first three and the last."""
    shown = [f"{step:,}" for step in steps]
    if len(shown) <= 6:
        return ", ".join(shown)
    return f"{', '.join(shown[:3])}, ... {shown[-1]} ({len(shown):,} times)"
