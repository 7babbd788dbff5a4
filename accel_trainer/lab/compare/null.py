"""How much the seed alone moves the number of a recipe, and what it takes to see a difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_trainer import OutputError
from accel_trainer.commands import Say, counted, format_table, train_at_once

from .compare import Plan, check_same_arms, check_same_data, common_metric, number_of, say_plan
from .distributions import chi_squared_quantile
from .paired import LEVEL, POWER, Interval, pairs_needed
from .text import size

_STEPS = (1, 2, 5)
_MOST_ROWS = 6


class Spread(NamedTuple):
    """A standard deviation, and where it lies with 95%, by chi-squared."""

    value: float
    interval: Interval

    @classmethod
    def of(cls, squares: float, freedom: int) -> Spread:
        """Return that of a sum of squares with so many degrees of freedom."""
        low, high = (
            math.sqrt(squares / chi_squared_quantile(each, freedom))
            for each in ((1 + LEVEL) / 2, (1 - LEVEL) / 2)
        )
        return cls(math.sqrt(squares / freedom), (low, high))


@dataclass(frozen=True)
class NoiseFloor:
    """What the seed alone does to the number of A."""

    plan: Plan
    metric: str
    whole: Spread
    """Of the numbers of whole runs with different seeds."""
    shared: Spread | None
    """Of the difference of two ends that share a beginning; None: the arms share none."""

    @property
    def whole_pairs(self) -> float:
        """The standard deviation of the difference of two whole runs that share nothing."""
        return math.sqrt(2) * self.whole.value

    def differences(self) -> list[float]:
        """Return round differences, from what pairs see easily to what is hard to see."""
        least = self.whole_pairs if self.shared is None else self.shared.value
        highest = 2 * self.whole_pairs
        start = math.floor(math.log10(highest))
        candidates = [
            step * 10.0**power for power in range(start, start - 4, -1) for step in reversed(_STEPS)
        ]
        kept = [each for each in candidates if least / 4 <= each <= highest]
        return sorted(kept[:_MOST_ROWS])

    def needed(self, difference: float) -> tuple[int, int | None]:
        """Return how many whole pairs, and how many that share, find a difference in 8 of 10."""
        whole = pairs_needed(difference, self.whole_pairs)
        if self.shared is None:
            return whole, None
        return whole, pairs_needed(difference, self.shared.value)


def find_noise_floor(plan: Plan, *, jobs: int, say: Say) -> NoiseFloor:
    """Train A with several seeds, each with a second end that has a different seed.

    The second end has another order of the data, and other augmentation and dropout. In a pair of A
    and B both ends have the same, so the difference of a real pair is rather smaller.

    Raises:
        OutputError: a run failed or diverged, or A does not repeat itself.
        KeyboardInterrupt: a signal to stop came; what is finished is kept.
    """
    branches, a = plan.branches, plan.question.a
    runs = [branches.arm(a, seed) for seed in plan.seeds]
    others = [branches.other_ending(seed) for seed in plan.seeds] if plan.step else []
    say_plan(plan, [*runs, *others], jobs=jobs, say=say)
    check_same_arms(plan, say)

    def train(seed: int, received: list[int]) -> None:
        branches.train_beginning(seed, received)
        branches.train_arm(a, seed, received)
        if plan.step:
            branches.train_other_ending(seed, received)

    for seed, _ in train_at_once(train, plan.seeds, jobs=jobs):
        say(f"seed {seed}: trained")
    check_same_data([*runs, *others])
    metric, numbers = _numbers([*runs, *others])
    whole, ends = numbers[: len(runs)], numbers[len(runs) :]
    gains = [other - number for number, other in zip(whole, ends, strict=False)]
    return NoiseFloor(
        plan,
        metric,
        whole=Spread.of(statistics.variance(whole) * (len(whole) - 1), len(whole) - 1),
        shared=Spread.of(sum(gain**2 for gain in gains), len(gains)) if gains else None,
    )


def _numbers(runs: Sequence[Path]) -> tuple[str, list[float]]:
    """Return the metric of the runs, and its last value in each."""
    found = [number_of(run) for run in runs]
    metric, _ = common_metric(found)
    for run, number in zip(runs, found, strict=True):
        if number is None or not math.isfinite(number.value):
            fact = f"{run} has no finite number to compare"
            raise OutputError("COMPARE", f"{fact}: lower the learning rate, or inspect the run")
    return metric, [number.value for number in found if number is not None]


def lines_of(found: NoiseFloor) -> Iterator[str]:
    """Yield the noise floor, and a table of what a difference costs."""
    plan, metric, whole = found.plan, found.metric, found.whole
    yield (
        f"the seed alone changes {metric} of a whole run by {_spread(metric, whole)} "
        f"(standard deviation of {counted(len(plan.seeds), 'run')}, {_between(metric, whole)})"
    )
    if found.shared is not None:
        yield (
            f"two endings that share their first {counted(plan.step, 'step')} differ by "
            f"{_spread(metric, found.shared)} ({_between(metric, found.shared)})"
        )
    if not whole.value:
        return
    yield "pairs needed to detect a difference in 8 of 10 comparisons:"
    heads = ["difference", "whole pairs"]
    if found.shared is not None:
        heads.append(f"with --at {plan.at.text}")
    rows = [
        [
            size(metric, each, (0, 2 * each)),
            *(f"{number:,}" for number in found.needed(each) if number),
        ]
        for each in found.differences()
    ]
    yield format_table(heads, rows)


def json_of(found: NoiseFloor) -> dict[str, Any]:
    """Return the answer as values of JSON."""
    needed = (
        [(each, *found.needed(each)) for each in found.differences()] if found.whole.value else []
    )
    return {
        "metric": found.metric,
        "num_seeds": len(found.plan.seeds),
        "at_step": found.plan.step,
        "num_steps": found.plan.length.num_steps,
        "spread_of_whole_runs": found.whole.value,
        "spread_of_whole_runs_interval": found.whole.interval,
        "spread_of_ends": found.shared and found.shared.value,
        "spread_of_ends_interval": found.shared and found.shared.interval,
        "power": POWER,
        "needed": [
            {"difference": each, "whole_pairs": whole, "pairs": shared}
            for each, whole, shared in needed
        ],
    }


def _spread(metric: str, spread: Spread) -> str:
    return size(metric, spread.value, (0, 2 * spread.value)) if spread.value else "nothing"


def _between(metric: str, spread: Spread) -> str:
    if not spread.value:
        return "all are equal"
    low, high = (size(metric, each, (0, 2 * spread.value)) for each in spread.interval)
    return f"95% interval {low.removesuffix(' points')} to {high}"
