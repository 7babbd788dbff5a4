"""Reduces rows to what two trainings of the same steps can be compared by."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from accel_trainer.commands import Row, Rows, at_both, by_place, filesystem

SINCE_LAST_ROW = "digest/samples"
"""The samples since the row before it, in the rows of runs before `digest/samples_so_far`."""


def as_in_rows(value: Any) -> Any:
    """Return a value as rows hold it: NaN and inf are texts there."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_digests(folder: Path) -> Rows:
    """Return what `step_digests.py` has written after each step of a replay; empty: nothing."""
    path = folder / "steps.jsonl"
    return by_place(map(json.loads, filesystem.read_lines(path))) if path.is_file() else {}


def shared(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Return both with the places and names that both have: callbacks may log different names."""
    one, other = at_both(one, other)
    return _of_names_in(one, other), _of_names_in(other, one)


def _of_names_in(rows: Rows, others: Rows) -> Rows:
    return {
        place: {name: value for name, value in row.items() if name in others[place]}
        for place, row in rows.items()
    }


def of_the_step(rows: Rows) -> Rows:
    """Return what is about the step alone: a training row also has means since the row before."""
    return {place: row if place[1] != "train" else _digests(row) for place, row in rows.items()}


def _digests(row: Row) -> Row:
    names = [name for name in row if name.startswith("digest/") and name != SINCE_LAST_ROW]
    return {name: row[name] for name in names}
