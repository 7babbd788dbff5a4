"""Values of a config that are out of range or of a wrong type are refused in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import GenericAlias, SimpleNamespace
from typing import Any

import numpy as np
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
    _fits,
    check_types,
    config_to_dict,
)
from accel_trainer.core.errors import ConfigError
from accel_trainer.run.config import RecipeConfig

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
    with pytest.raises(ConfigError, match=r"schedule.milestones is \(0.5, 3.0\): set it above 0"):
        INSIDE_ONE.check(SimpleNamespace(milestones=(0.5, 3.0)), "schedule", "milestones")


@pytest.mark.parametrize(
    ("part", "name", "value", "fits"),
    [
        ("batch", "order", "balanced", True),
        ("batch", "order", "random", False),
        ("batch", "reduce", "fast", False),
        ("trainer", "monitor_mode", None, True),
        ("trainer", "monitor_mode", "highest", False),
        ("trainer", "monitor", ["eval/loss"], False),
        ("trainer", "num_epochs", np.int64(3), True),
        ("trainer", "num_epochs", 1.5, False),
        ("optimizer", "learning_rate", 1, True),
        ("schedule", "shape", "zigzag", False),
        ("run", "quiet", "yes", False),
    ],
)
def test_a_value_that_a_program_gives_is_checked_as_one_of_a_flag(
    part: str, name: str, value: Any, fits: bool
) -> None:
    group = replace(getattr(RecipeConfig(), part), **{name: value})
    config = replace(RecipeConfig(), **{part: group})
    if fits:
        check_types(config, RecipeConfig)
        return
    with pytest.raises(ConfigError, match=f"{part}.{name} is .*: give "):
        check_types(config, RecipeConfig)


class OldAlias(GenericAlias):
    """`tuple[str, ...]` as in Python 3.10, where it counts as a class."""

    __class__ = property(lambda self: type)  # type: ignore[assignment]  # on purpose


@dataclass(frozen=True)
class WithSets:
    layers: frozenset[int] = frozenset({3, 1, 2})
    names: frozenset[str] = frozenset({"b", "c", "a"})


def test_a_set_is_stored_as_a_list_whose_order_no_process_decides() -> None:
    assert config_to_dict(WithSets()) == {"layers": [1, 2, 3], "names": ["a", "b", "c"]}


def test_a_tuple_of_texts_is_accepted_where_python_takes_it_for_a_class() -> None:
    kind = OldAlias(tuple, (str, ...))
    assert isinstance(kind, type)
    assert _fits(("a", "b"), kind)


def test_the_defaults_of_all_settings_are_of_their_types() -> None:
    check_types(RecipeConfig(), RecipeConfig)


@dataclass(frozen=True)
class Inner:
    width: int = 3


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()


@dataclass(frozen=True)
class Own:
    outer: Outer = Outer()


def test_a_value_of_a_wrong_type_is_named_with_all_groups_around_it() -> None:
    wrong: Any = "three"
    with pytest.raises(ConfigError, match="outer.inner.width is 'three': give int"):
        check_types(Own(Outer(Inner(wrong))), Own)
