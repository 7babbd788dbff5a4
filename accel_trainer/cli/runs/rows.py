"""The rows of a run, as commands compare them: without what differs by machine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.filesystem import read_lines
from ...core.history import read_history

Row = Mapping[str, Any]
Place = tuple[int, str]
Rows = Mapping[Place, Row]
"""What is known at each step and event, which are not repeated in the row."""

SINCE_LAST_ROW = "digest/samples"
"""The samples since the row before it, in the rows of runs before `digest/samples_so_far`."""
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


def read_digests(folder: Path) -> dict[Place, Row]:
    """Return what `step_digests.py` has written after each step of a replay; empty: nothing."""
    path = folder / "steps.jsonl"
    return by_place(map(json.loads, read_lines(path))) if path.is_file() else {}


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


def shared(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Return both with the places and names that both have: other callbacks log other names."""
    one, other = at_both(one, other)
    return _of_names_in(one, other), _of_names_in(other, one)


def _of_names_in(rows: Rows, others: Rows) -> Rows:
    return {
        place: {name: value for name, value in row.items() if name in others[place]}
        for place, row in rows.items()
    }


def of_the_step(rows: Rows) -> Rows:
    """Return what rows say of their steps: one of training has means since the row before."""
    return {place: row if place[1] != "train" else _digests(row) for place, row in rows.items()}


def _digests(row: Row) -> Row:
    names = [name for name in row if name.startswith("digest/") and name != SINCE_LAST_ROW]
    return {name: row[name] for name in names}
