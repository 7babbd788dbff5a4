"""Tells in plain English what a comparison found."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from accel_trainer.commands import JsonObject, counted, format_number, is_fraction

from .compare import Comparison, Plan
from .paired import Interval, Paired

_DRAWN_COLUMNS = 60


def setup_lines(plan: Plan) -> Iterator[str]:
    """Yield what A and B are, and what they share."""
    if plan.why_whole is not None:
        yield (
            f"B cannot branch off from a run of A ({plan.why_whole}), so the pairs are whole runs "
            "that share only their seeds (--at 0)"
        )
    where = f"from {_place(plan)}" if plan.step else "from the start"
    yield f"A is {shlex.join([plan.question.recipe.name, *plan.question.a.flags])}"
    yield f"B is A with {plan.question.b_flags}, {where}"


def lines_of(found: Comparison) -> Iterator[str]:
    """Yield the answer, and what it rests on."""
    paired = found.paired
    yield _verdict_line(found)
    if paired.interval is not None:
        yield drawn(paired.interval, paired.mean)
    if paired.means is not None:
        a, b = (format_number(found.metric, mean) for mean in paired.means)
        yield f"{found.metric}: A {a}, B {b} (means of {counted(len(paired.pairs), 'seed')})"
    ties = len(paired.pairs) - paired.wins - paired.losses
    equal = f", {ties} equal" if ties else ""
    yield (
        f"sign test: B wins {paired.wins} of {counted(len(paired.pairs), 'pair')}{equal} "
        f"(p = {paired.sign_p:.2g})"
    )
    yield from _sharing_lines(found)


def _verdict_line(found: Comparison) -> str:
    """Return the answer in one sentence."""
    paired, metric = found.paired, found.metric
    num_pairs = counted(len(paired.pairs), "pair")
    if found.is_equal:
        changes = "changes nothing" + f" after step {found.plan.step}" * (found.plan.step > 0)
        advice = ": --at 0 compares whole runs" if found.plan.step else ""
        return f"no difference: B {changes}, all weights are bit-identical{advice}"
    if paired.is_finite and not any(paired.gains):
        return f"no difference: both arms have the same {metric} in all {num_pairs}"
    if paired.interval is None:
        return _without_interval(paired, metric, num_pairs)
    low, high = paired.interval
    if paired.verdict == "undecided":
        between = f"between {_size(metric, -low, paired.interval)} worse"
        better = f"{_size(metric, high, paired.interval)} better"
        return f"undecided: B is {between} and {better} in {metric} (95% interval, {num_pairs})"
    if paired.verdict == "worse":
        low, high = -high, -low
    mean = _size(metric, abs(paired.mean), paired.interval)
    numbers = " to ".join(_number(metric, each, paired.interval) for each in (low, high))
    fact = f"{mean} of {metric} (95% interval {numbers}, {num_pairs})"
    return f"B is {paired.verdict} by {fact}"


def drawn(interval: Interval, mean: float) -> str:
    """Return a line with the interval of the gain, its mean and 0: `worse ..0.[--*--].. better`."""
    low, high = min(interval[0], 0.0), max(interval[1], 0.0)

    def place(number: float) -> int:
        return round((number - low) / (high - low) * (_DRAWN_COLUMNS - 1))

    first, last = map(place, interval)
    line = ["."] * _DRAWN_COLUMNS
    line[first : last + 1] = "-" * (last + 1 - first)
    for number, mark in ((mean, "*"), (interval[0], "["), (interval[1], "]"), (0.0, "0")):
        line[place(number)] = mark
    return f"worse ..{''.join(line)}.. better"


def _size(metric: str, difference: float, scale: Interval) -> str:
    """Return a difference with its unit: points for a fraction, else the number alone."""
    return _number(metric, difference, scale) + " points" * is_fraction(metric)


def json_of(found: Comparison) -> JsonObject:
    """Return the answer as values of JSON; what has no value is None."""
    plan, paired = found.plan, found.paired
    pairs = [
        {
            "seed": pair.seed,
            "a": _finite(pair.a),
            "b": _finite(pair.b),
            "folder_a": str(a),
            "folder_b": str(b),
        }
        for pair, (a, b) in zip(paired.pairs, found.folders, strict=True)
    ]
    return {
        "verdict": paired.verdict,
        "recipe": str(plan.question.recipe),
        "flags": [*plan.question.a.flags],
        "b_flags": plan.question.b_flags,
        "metric": found.metric,
        "lower_is_better": paired.is_lower_better,
        "means": paired.means,
        "gain": _finite(paired.mean),
        "interval": paired.interval,
        "num_pairs": len(pairs),
        "wins": paired.wins,
        "losses": paired.losses,
        "sign_test_p": paired.sign_p,
        "equal_to_the_bit": found.is_equal,
        "at_step": plan.step,
        "num_steps": plan.length.num_steps,
        "why_whole": plan.why_whole,
        "changed": plan.question.changed,
        "rho": paired.rho,
        "rho_interval": paired.rho_interval,
        "whole_runs_needed": _whole_runs(paired),
        "whole_runs_trained": plan.work,
        "pairs": pairs,
    }


def _whole_runs(paired: Paired) -> float | None:
    """Return how many runs that share nothing would be as precise; None: not known."""
    ratio, interval = paired.variance_ratio, paired.rho_interval
    if ratio and interval and interval[0] > 0:  # otherwise, sharing may have saved nothing
        return 2 * len(paired.pairs) * ratio
    return None


def _place(plan: Plan) -> str:
    step, per_epoch = plan.step, plan.length.steps_per_epoch
    epoch = f", the end of epoch {step // per_epoch}" if step % per_epoch == 0 else ""
    return f"step {step} of {plan.length.num_steps}{epoch}"


def _without_interval(paired: Paired, metric: str, num_pairs: str) -> str:
    if paired.is_finite:
        why = f"the difference is the same in all {num_pairs}"
    else:
        diverged = [sum(not math.isfinite(pair[arm]) for pair in paired.pairs) for arm in (1, 2)]
        why = f"A has diverged {_times(diverged[0])}, B {_times(diverged[1])}"
    if paired.verdict == "undecided":
        return f"undecided: {why}, and the sign test alone does not decide"
    return f"B is {paired.verdict} in {metric} by the sign test: {why}"


def _sharing_lines(found: Comparison) -> Iterator[str]:
    paired, plan = found.paired, found.plan
    if paired.rho is None:
        return
    shared = f"the first {plan.step} steps" if plan.step else "the seed alone"
    interval = paired.rho_interval
    between = "" if interval is None else f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})"
    yield f"rho {paired.rho:.2f}{between}: the correlation of the two arms, which share {shared}"
    if needed := _whole_runs(paired):
        about = float(f"{needed:.2g}")  # two digits
        yield (
            f"as precise as about {about:,.0f} whole runs that share nothing, for the steps of "
            f"{plan.work:.3g}"
        )


def _number(metric: str, difference: float, scale: Interval) -> str:
    """Return a number with as many decimals as half of an interval has meaning."""
    factor = 100 if is_fraction(metric) else 1
    half = factor * (scale[1] - scale[0]) / 2
    leading = math.floor(math.log10(half))
    decimals = max(0, -leading + (half < 2 * 10**leading))
    return f"{factor * difference:.{decimals}f}"


def _times(number: int) -> str:
    return "once" if number == 1 else counted(number, "time") if number else "never"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
