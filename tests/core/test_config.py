"""Numbers of a config that are out of range are refused in one line."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from accel_trainer.core.config import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    BELOW_ONE,
    FRACTION,
    INSIDE_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
)
from accel_trainer.core.errors import ConfigError

EDGES = {
    "AT_LEAST_ONE": (AT_LEAST_ONE, [1, 2, math.inf], [0, -1, 0.5]),
    "ABOVE_ZERO": (ABOVE_ZERO, [1e-9, math.inf], [0.0, -1.0]),
    "POSITIVE": (POSITIVE, [1e-9, 1e9], [0.0, math.inf]),
    "NOT_NEGATIVE": (NOT_NEGATIVE, [0.0, 1e9], [-1e-9, math.inf]),
    "FRACTION": (FRACTION, [0.0, 1.0], [-0.1, 1.1]),
    "BELOW_ONE": (BELOW_ONE, [0.0, 0.999], [-0.1, 1.0]),
    "INSIDE_ONE": (INSIDE_ONE, [0.001, 0.999], [0.0, 1.0]),
}


@pytest.mark.parametrize(("numbers", "inside", "outside"), EDGES.values(), ids=EDGES)
def test_a_range_ends_where_it_says_and_nan_is_in_none(
    numbers: Range, inside: list[Any], outside: list[Any]
) -> None:
    assert all(numbers.has(number) for number in inside)
    assert not any(numbers.has(number) for number in [*outside, math.nan])


@pytest.mark.parametrize("value", ["3", [1], object()])
def test_what_is_no_number_is_in_no_range(value: object) -> None:
    with pytest.raises(ConfigError, match="group.value is .*: set it to 1 or more"):
        AT_LEAST_ONE.check(SimpleNamespace(value=value), "group", "value")


def test_each_number_of_a_tuple_is_looked_at_and_none_is_allowed() -> None:
    INSIDE_ONE.check(
        SimpleNamespace(nothing=None, milestones=(0.5, 0.75)), "schedule", "nothing", "milestones"
    )
    with pytest.raises(
        ConfigError, match=r"schedule.milestones is \(0.5, 3.0\): set it above 0 and below 1"
    ):
        INSIDE_ONE.check(SimpleNamespace(milestones=(0.5, 3.0)), "schedule", "milestones")
