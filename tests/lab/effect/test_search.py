"""Which changes make a difference is found with few trials, also if some need each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from accel_trainer.lab.effect.search import find_changes

NAMES = [f"s{number:02}" for number in range(17)]


class Outcome(NamedTuple):
    value: Any
    refused: str | None = None


def search(outcome: Callable[[frozenset[str]], Outcome]) -> tuple[list[tuple[str, ...]], int]:
    """Return the names that were found, and how many sets were tried."""
    tried: set[frozenset[str]] = set()

    def outcomes(sets: Sequence[frozenset[str]]) -> list[Outcome]:
        tried.update(sets)
        return [outcome(names) for names in sets]

    return [change.names for change in find_changes(NAMES, outcomes)], len(tried)


@pytest.mark.parametrize("wanted", [[], ["s00"], ["s16"], ["s03", "s04"], ["s02", "s11"], NAMES])
def test_exactly_the_changes_that_matter_are_found(wanted: list[str]) -> None:
    found, num_tried = search(lambda names: Outcome(names & {*wanted}))
    assert found == [(name,) for name in wanted]
    assert num_tried <= 2 + 5 * len(wanted)


def test_a_change_that_needs_another_one_is_found() -> None:
    found, _ = search(lambda names: Outcome({"s03", "s09"} <= names))
    assert found == [("s09",)]


def test_changes_that_are_refused_apart_are_found_together() -> None:
    def outcome(names: frozenset[str]) -> Outcome:
        is_half = len(names & {"s07", "s08"}) == 1
        return Outcome(names & {"s07", "s08", "s12"}, "half" if is_half else None)

    found, _ = search(outcome)
    assert found == [("s07", "s08"), ("s12",)]
