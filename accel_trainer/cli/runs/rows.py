"""The rows of a run, as commands compare them: without what differs by machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.history import read_history

Row = Mapping[str, Any]
Place = tuple[int, str]
Rows = Mapping[Place, Row]
"""What is known at each step and event, which are not repeated in the row."""

_END = 2**62
_PLACE = ("event", "optimizer_step")


def read_rows(
    folder: Path, *, after: int = -1, until: int = _END, left_out: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of the steps after `after` up to `until`, without what differs by machine.

    Nor do they have the names that are `left_out`. NaN and inf are texts.
    """
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith("perf/") and name not in left_out
        }
        for row in read_history(folder)
        if after < row["optimizer_step"] <= until
    ]


def by_place(rows: Iterable[Row]) -> dict[Place, Row]:
    """Return rows by their steps and events, in their order."""
    return {
        (row["optimizer_step"], row["event"]): {
            name: value for name, value in row.items() if name not in _PLACE
        }
        for row in rows
    }


def at_both(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Return both with the places that both have."""
    places = [place for place in one if place in other]
    return {place: one[place] for place in places}, {place: other[place] for place in places}
