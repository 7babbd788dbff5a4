"""Quantiles of Student's t, and the sign test: for a few pairs, exact."""

from __future__ import annotations

import math

_HALVINGS = 200


def t_quantile(probability: float, freedom: int) -> float:
    """Return the value below which t lies with a probability from 0.5 on."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return high


def sign_test(wins: int, losses: int) -> float:
    """Return how likely it is that a fair coin falls at least as unevenly, in either direction."""
    num_flips = wins + losses
    tail = sum(math.comb(num_flips, heads) for heads in range(min(wins, losses) + 1))
    return min(1.0, tail / 2.0 ** (num_flips - 1))


def _t_below(value: float, freedom: int) -> float:
    """Return the probability that t is below a value that is not negative.

    The sums are those of Abramowitz and Stegun, 26.7.3 and 26.7.4, which are exact for whole
    degrees of freedom.
    """
    angle = math.atan(value / math.sqrt(freedom))
    squared = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(2 + is_odd, freedom - 1, 2):
        term *= squared * (number - 1) / number
        total += term
    between = math.sin(angle) * total  # of -value and value
    if is_odd:
        between = 2 / math.pi * (angle + between)
    return 0.5 + between / 2
