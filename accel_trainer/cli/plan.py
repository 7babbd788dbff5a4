"""`accel-trainer plan [RECIPE.py] [its flags] [--num-processes N]`: show what a run will do.

It prints the batches, steps and learning rates, and the steps after which the run evaluates and
saves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..core.learning_rate import Schedule
from ..core.train_state import TrainState
from ..run.config import RecipeConfig
from ..run.optimization import plan_learning_rate
from ..run.parser import parse_config
from ..vision import BadImageConfig, PhotoConfig, load_photos
from ..vision.sources.find import find_image_source
from .common.output import show
from .common.parser import CommandParser
from .common.recipes import find_config_class

_EXAMPLE = (
    "example: accel-trainer plan recipes/cifar.py --config recipes/configs/digits.yaml "
    "--num-processes 8"
)
# A plan of these datasets needs no download.
_KNOWN_SAMPLES = {"cifar10": 50_000, "cifar100": 50_000}
_NUM_ROWS = 10
_MAX_STEPS = 10_000_000  # more would take minutes to list


@dataclass(frozen=True)
class RunPlan:
    """What a run will do, computed from its config and the size of its data. Steps count from 1."""

    config: RecipeConfig
    batch: BatchPlan
    peak_learning_rate: float
    warmup_steps: int
    learning_rate_at: Schedule
    num_steps: int
    evaluation_steps: Sequence[int]
    save_steps: Sequence[int]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Starts no process and trains nothing."""
    argv = list(sys.argv[1:] if argv is None else argv)
    recipe = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    parser = CommandParser(
        prog="accel-trainer plan [RECIPE.py]",
        description=__doc__,
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num-processes",
        type=int,
        metavar="N",
        default=1,
        help="processes to plan for; default: 1",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        metavar="N",
        help="training samples; default: counted in the recipe's --dataset",
    )
    options, flags = parser.parse_known_args(argv)
    config_class = RecipeConfig if recipe is None else find_config_class(recipe)
    config = parse_config(config_class, flags, description=__doc__)
    num_samples = _count_samples(config) if options.num_samples is None else options.num_samples
    plan = plan_run(config, num_samples=num_samples, num_processes=options.num_processes)
    show("\n".join(describe(plan)))
    return 0


def _count_samples(config: Any) -> int:
    """Return the number of training samples, counted by the reader that the recipe would use."""
    dataset = getattr(config, "dataset", None)
    settings = vars(config).values()
    if not isinstance(dataset, str):
        raise ConfigError(
            "PLAN", "this recipe has no --dataset to count samples in: add --num-samples"
        )
    for photos in settings:
        if isinstance(photos, PhotoConfig):
            found = load_photos(
                dataset,
                image_column=photos.image_column,
                label_column=photos.label_column,
                val_fraction=photos.val_fraction,
                cache_dir=config.run.cache_dir,
            )
            return len(found.train)
    if not any(isinstance(images, BadImageConfig) for images in settings):
        fact = (
            "only a recipe with the settings of load_images or load_photos "
            "(BadImageConfig, PhotoConfig) is counted"
        )
        raise ConfigError("PLAN", f"{fact}: add --num-samples")
    # This decodes and caches nothing.
    return _KNOWN_SAMPLES.get(dataset) or len(find_image_source(dataset).read().train.labels)


def plan_run(config: RecipeConfig, *, num_samples: int, num_processes: int) -> RunPlan:
    """Return what a run of `config` on `num_processes` will do.

    Raises:
        ConfigError: the run would refuse to start.
    """
    if num_processes < 1:
        raise ConfigError("PLAN", f"--num-processes is {num_processes}: set it to 1 or more")
    batch = config.batch.plan(num_samples, num_processes=num_processes)
    peak_learning_rate, learning_rate_at = plan_learning_rate(config, batch)
    total_steps = config.trainer.num_epochs * batch.steps_per_epoch
    num_steps = min(total_steps, config.trainer.max_steps or total_steps)
    if num_steps > _MAX_STEPS:
        raise ConfigError(
            "PLAN", f"the run has {num_steps:,} steps: plan fewer, such as with --max-steps 1000000"
        )
    # A run also evaluates and saves at its last step.
    evaluation_steps = {num_steps}
    save_steps = {num_steps}
    for position in _positions(config, batch):
        if config.trainer.evaluates_after(position, batch.steps_per_epoch):
            evaluation_steps.add(position.optimizer_step)
        if position.step_in_epoch == batch.steps_per_epoch:
            position.finish_epoch()
        if config.checkpoint.is_due(position):
            save_steps.add(position.optimizer_step)
    return RunPlan(
        config=config,
        batch=batch,
        peak_learning_rate=peak_learning_rate,
        warmup_steps=config.schedule.warmup_steps(
            total_steps=total_steps, steps_per_epoch=batch.steps_per_epoch
        ),
        learning_rate_at=learning_rate_at,
        num_steps=num_steps,
        evaluation_steps=sorted(evaluation_steps),
        save_steps=sorted(save_steps),
    )


def _positions(config: RecipeConfig, batch: BatchPlan) -> Iterator[TrainState]:
    """Yield the position of the run after each step, before the next epoch begins."""
    position = TrainState()
    while position.epoch < config.trainer.num_epochs:
        position.advance(batch.step_batch_size(position.step_in_epoch))
        yield replace(position)
        if position.step_in_epoch == batch.steps_per_epoch:
            position.finish_epoch()
        if position.optimizer_step == config.trainer.max_steps:
            return


def describe(plan: RunPlan) -> list[str]:
    """Return the plan as lines of text."""
    batch = plan.batch
    trainer = plan.config.trainer
    optimizer = plan.config.optimizer.with_learning_rate()
    last = batch.step_batch_size(batch.steps_per_epoch - 1)
    stop = "" if plan.num_steps == trainer.num_epochs * batch.steps_per_epoch else " (--max-steps)"
    ratio = f"{batch.global_batch_size}/{optimizer.base_batch_size}"
    if optimizer.learning_rate_scaling == "none":
        scaling = ""
    elif optimizer.learning_rate_scaling == "linear":
        scaling = f" = {optimizer.learning_rate:g} x {ratio}"
    else:
        scaling = f" = {optimizer.learning_rate:g} x sqrt({ratio})"
    lines = [batch.describe()]
    if last != batch.global_batch_size:
        lines.append(f"the last step of an epoch has {last} samples")
    lines.append(f"{trainer.num_epochs} epochs, {plan.num_steps} steps{stop}")
    lines.append(f"peak learning rate {plan.peak_learning_rate:g}{scaling}, {_warmup(plan)}")
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
