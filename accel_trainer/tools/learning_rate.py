"""The learning rate that a run recorded, with its peak, which mostly lies between two rows."""

from __future__ import annotations

import json
import math
from bisect import bisect

from ..config import load_config
from ..schedule import Schedule, ScheduleConfig, build_schedule, scale_learning_rate
from .run_reader import RunReader

LEARNING_RATE = "optim/learning_rate"


def with_peak(run: RunReader) -> tuple[list[int], list[float]]:
    """Return the optimizer steps and the learning rates that were recorded, and the end of the rise.

    That is left out where config and rows do not agree, as after a change of either in the middle of a run.
    """
    steps, values = run.series(LEARNING_RATE)
    try:
        learning_rate_at, peak_step = _planned(run)
    except (KeyError, TypeError, ValueError):
        return steps, values
    is_as_planned = all(
        math.isclose(value, learning_rate_at(step - 1), rel_tol=1e-6) for step, value in zip(steps, values, strict=True)
    )
    if is_as_planned and steps[0] < peak_step < steps[-1]:
        place = bisect(steps, peak_step)
        steps.insert(place, peak_step)
        values.insert(place, learning_rate_at(peak_step - 1))
    return steps, values


def _planned(run: RunReader) -> tuple[Schedule, int]:
    """Return the learning rate by completed steps, and the step that has the peak, as config and rows say."""
    optimizer, schedule = run.config["optimizer"], load_config(ScheduleConfig, json.dumps(run.config["schedule"]))
    steps_per_epoch = max(row["optimizer_step"] for row in run.rows if row["epoch"] == 1)
    total_steps = run.config["trainer"]["num_epochs"] * steps_per_epoch
    peak = scale_learning_rate(
        optimizer["learning_rate"],
        rule=optimizer["learning_rate_scaling"],
        global_batch_size=run.config["batch"]["global_batch_size"],
        base_batch_size=optimizer["base_batch_size"],
    )
    learning_rate_at = build_schedule(
        schedule, peak_learning_rate=peak, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    return learning_rate_at, schedule.warmup_steps(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
