"""What pairs of numbers say, and how often they are wrong where nothing differs."""

from __future__ import annotations

import math
import random

import pytest

from accel_trainer.lab.compare.distributions import sign_test, t_quantile
from accel_trainer.lab.compare.paired import Pair, Paired, Verdict


def paired(*pairs: tuple[float, float], is_lower_better: bool = False) -> Paired:
    return Paired([Pair(seed, a, b) for seed, (a, b) in enumerate(pairs)], is_lower_better)


def test_quantiles_are_those_of_the_tables() -> None:
    known = {
        (0.975, 1): 12.7062047,
        (0.975, 2): 4.30265273,
        (0.975, 7): 2.36462425,
        (0.8, 7): 0.8960296,
        (0.975, 200): 1.97189622,
    }
    for (probability, freedom), value in known.items():
        assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-7)


def test_the_sign_test_counts_both_tails() -> None:
    known = {(6, 0): 2 / 64, (0, 6): 2 / 64, (7, 1): 18 / 256, (4, 4): 1.0, (0, 0): 1.0}
    assert {wins: sign_test(*wins) for wins in known} == known


@pytest.mark.parametrize(
    ("found", "verdict", "has_interval"),
    [
        (paired((0.5, 0.61), (0.6, 0.7), (0.7, 0.79)), "better", True),
        (paired((0.5, 0.61), (0.6, 0.7), (0.7, 0.79), is_lower_better=True), "worse", True),
        (paired((0.5, 0.7), (0.6, 0.5)), "undecided", True),
        (paired((0.5, 0.5), (0.6, 0.6)), "undecided", False),
        # Equal gains say nothing of their spread, however the sums are rounded.
        (paired((0.1, 0.3), (0.2, 0.4), (0.3, 0.5)), "undecided", False),
        (paired(*[(0.1 * n, 0.1 * n + 0.2) for n in range(6)]), "better", False),
        (paired(*[(0.5, math.nan)] * 5), "undecided", False),
        (paired(*[(0.5, math.nan)] * 6), "worse", False),
        (paired(*[(math.inf, 0.5)] * 6, is_lower_better=True), "better", False),
        (paired(*[(math.nan, math.nan)] * 9), "undecided", False),
        (paired(*[(0.5 + 0.01 * n, 0.9) for n in range(8)], (0.5, math.nan)), "better", False),
    ],
)
def test_the_interval_decides_and_without_one_the_sign_test(
    found: Paired, verdict: Verdict, has_interval: bool
) -> None:
    assert (found.verdict, found.interval is not None) == (verdict, has_interval)


@pytest.mark.parametrize("grid", [None, 1 / 200])
def test_where_nothing_differs_one_in_twenty_comparisons_decides(grid: float | None) -> None:
    """An accuracy of 200 samples is the worst case: t alone would decide in 6.4 % of these."""
    generator = random.Random(0)

    def arm(of_the_seed: float) -> float:
        value = 0.9 + of_the_seed + 0.0032 * generator.gauss(0, 1)
        return value if grid is None else round(value / grid) * grid

    def verdict() -> Verdict:
        seeds = [0.0095 * generator.gauss(0, 1) for _ in range(8)]
        return paired(*((arm(seed), arm(seed)) for seed in seeds)).verdict

    verdicts = [verdict() for _ in range(10_000)]
    assert sum(each != "undecided" for each in verdicts) <= 550
    assert verdicts.count("better") == pytest.approx(verdicts.count("worse"), abs=100)


def test_rho_is_what_pairing_saves() -> None:
    generator = random.Random(0)
    seeds = [generator.gauss(0, 1) for _ in range(4000)]
    found = paired(*((s + generator.gauss(0, 0.2), s + generator.gauss(0, 0.2)) for s in seeds))
    assert found.rho == pytest.approx(1 / 1.04, abs=0.01)
    assert found.variance_ratio == pytest.approx(26, rel=0.1)  # 2.08 / 0.08
    low, high = found.rho_interval or (0, 0)
    assert low < 1 / 1.04 < high
    assert paired((1, 2), (2, 4)).rho is None
    assert paired((1, 1), (1, 2), (1, 3), (1, 4)).rho is None
