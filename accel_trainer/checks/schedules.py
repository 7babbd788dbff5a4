"""Whether a schedule of torch was made for the steps of this run."""

from __future__ import annotations

from itertools import groupby, pairwise

from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR

from ..core.learning_rate import Schedule
from ..optim.lr_scheduler import TorchSchedule

_CYCLIC = (CosineAnnealingWarmRestarts, CyclicLR)
_MANY_RISES = 2
_MAX_JUDGED = 10_000


def describe_misfit(schedule: Schedule | None, *, num_steps: int) -> str | None:
    """Return a warning if a scheduler of torch was probably not made for the `num_steps` here.

    So it is if it changes more than the learning rate.

    One that is meant to step once an epoch soon reaches 0, or rises and falls too often, other than
    by restarts: jumps in one step after a fall of several. Of a long run, the first steps are
    looked at.
    """
    if not isinstance(schedule, TorchSchedule):
        return None
    num_steps = min(num_steps, _MAX_JUDGED)
    rates = [schedule(step) for step in range(num_steps)]
    (group,) = schedule.stand_in.param_groups
    before = {**schedule.stand_in.defaults, "lr": group["lr"]}
    if lost := [name for name, value in before.items() if group[name] != value]:
        return (
            f"{type(schedule.scheduler).__name__} also changes {', '.join(lost)}, "
            "which a schedule does not: set cycle_momentum=False, or change it in before_update"
        )
    if isinstance(schedule.scheduler, _CYCLIC) or schedule.is_by_epoch:
        return None
    peak = max(rates, default=0.0) or 1.0
    shape = [round(rate / peak, 9) for rate in rates]
    fact = "the learning rate changes after each step, not after each epoch, and"
    fix = "set the lengths of the schedule in steps, such as its T_max"
    if 2 * (num_low := sum(rate < 1e-6 * peak for rate in rates)) > num_steps:
        return f"{fact} is below a millionth of its peak in {num_low} of {num_steps} steps: {fix}"
    rises = [after > before for before, after in pairwise(shape) if after != before]
    runs = [(is_rise, len([*steps])) for is_rise, steps in groupby(rises)]
    num_rises = sum(
        is_rise and (up > 1 or down == 1) for (_, down), (is_rise, up) in pairwise(runs)
    )
    if num_rises < _MANY_RISES:
        return None
    return f"{fact} rises and falls {num_rises} times in {num_steps} steps: {fix}"
