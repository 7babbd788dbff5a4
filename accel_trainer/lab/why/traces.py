"""Compares what `trace.py` has recorded of the same step of two replays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.commands import filesystem

from .finding import ModuleState

Row = Mapping[str, Any]
_PHASES_OF_MODULES = ("forward", "backward")


@dataclass(frozen=True)
class TraceDifference:
    """The first rows that differ."""

    rows: tuple[Row, Row]
    place: str
    """`inputs` or `outputs`, `plain` for arguments that are no tensors, `name` for another
    operator."""
    position: int
    """The number of the tensor that differs, in its place."""

    @property
    def kind(self) -> str:
        """The kind of the first row."""
        return str(self.rows[0]["kind"])

    @property
    def plain_values(self) -> tuple[str, str] | None:
        """The two values of an argument that is no tensor, if that differs first."""
        if self.place != "plain":
            return None
        first, second = (row["plain"][self.position] for row in self.rows)
        return first, second

    @property
    def has_tensors(self) -> bool:
        """Whether the two values can be kept, and compared."""
        return self.place in ("inputs", "outputs") and self.kind != "unsaved"

    def where(self) -> str:
        """Return where in the step it is, such as `backward of layer3.0.conv2`.

        The name of the row, which is printed after it, tells which state or gradient.
        """
        row = self.rows[0]
        if row["kind"] == "state":
            return "before its data"
        if row["kind"] in ("batch", "sample"):
            return "data"
        if row["kind"] == "gradient":
            return "gradient"
        owned = row.get("owned") or []
        changed = owned[self.position] if self.place == "outputs" and owned else ""
        of = row.get("module") or changed
        is_own = row["phase"] in ("forward", "backward")
        return f"{row['phase']} of {of or 'the model itself'}" if of or is_own else row["phase"]


def read_trace(folder: Path) -> list[Row]:
    """Return the rows that a replay has recorded."""
    lines = filesystem.read_lines(folder / "trace.jsonl")
    return [{**json.loads(line), "index": index} for index, line in enumerate(lines)]


def compare_traces(one: Sequence[Row], other: Sequence[Row]) -> TraceDifference | None:
    """Return the first difference, without that of attributes; None if there is none."""
    mine, theirs = ([row for row in rows if _is_compared(row)] for rows in (one, other))
    for rows in zip(mine, theirs, strict=False):
        if (found := _compare_rows(*rows)) is not None:
            return TraceDifference(rows, *found)
    return None


def _is_compared(row: Row) -> bool:
    """Whether a row must be equal.

    Not what a loader does as it starts, which depends on where the replay began: its batches are
    compared.
    """
    is_of_loader = row["kind"] == "operator" and row["phase"] == "data" and row["line"] is None
    return row["kind"] != "unsaved" and not is_of_loader


def _compare_rows(one: Row, other: Row) -> tuple[str, int] | None:
    if any(one[name] != other[name] for name in ("kind", "name", "phase")):
        return "name", 0
    if one["phase"] == "data" and one["outputs"] == other["outputs"]:
        return None  # such as an equal sample of a dataset that differs elsewhere
    for place in ("inputs", "plain", "outputs"):
        mine, theirs = one.get(place) or [], other.get(place) or []
        if len(mine) != len(theirs):
            return "name", 0
        pairs = enumerate(zip(mine, theirs, strict=True))
        for position, (left, right) in pairs:
            if left != right:
                return place, position
    return None


def attributes_that_differ(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    """Return the names of attributes that no checkpoint holds and that differed before the step."""
    mine, theirs = (_by_name(rows, "unsaved") for rows in (one, other))
    return sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])


@dataclass(frozen=True)
class DataDifference:
    """How the batches of two traces differ."""

    has_other_ids: bool
    samples: list[str]
    """The samples whose contents differ, as they were in the batch."""
    was_read_apart: bool | None
    """Whether the dataset returned other samples; None: worker processes have read them, and are
    not looked into."""


def compare_data(one: Sequence[Row], other: Sequence[Row]) -> DataDifference:
    """Return how the batches differ."""
    batch = [_by_name(rows, "batch") for rows in (one, other)]
    read = [_by_name(rows, "sample") for rows in (one, other)]
    ids = "the ids of the samples"
    samples = [
        name
        for name in batch[0].keys() & batch[1].keys()
        if name != ids and batch[0][name] != batch[1][name]
    ]
    return DataDifference(
        has_other_ids=batch[0].get(ids) != batch[1].get(ids),
        samples=sorted(samples, key=lambda name: (len(name), name)),
        was_read_apart=read[0] != read[1] if read[0] and read[1] else None,
    )


def _by_name(rows: Sequence[Row], kind: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault(row["name"], []).append(row["outputs"])
    return found


def module_states(
    one: Sequence[Row], other: Sequence[Row], found: TraceDifference | None
) -> list[ModuleState]:
    """Return the modules in the order of their first use, each below its parents."""
    tensors = {row["name"] for row in one if row["kind"] == "state"}

    def module_of(row: Row) -> str:
        # What a parameter receives in the backward belongs to its module.
        name = str(row["module"])
        return name.rpartition(".")[0] if name in tensors else name

    mine, theirs = (
        [row for row in rows if row["kind"] == "operator" and row["phase"] in _PHASES_OF_MODULES]
        for rows in (one, other)
    )
    equal: dict[str, dict[str, bool]] = {"": {}}
    for row, its in zip(mine, theirs, strict=False):
        name = module_of(row)
        for end in [index for index, letter in enumerate(name) if letter == "."]:
            equal.setdefault(name[:end], {})
        states = equal.setdefault(name, {})
        is_equal = _compare_rows(row, its) is None
        states[row["phase"]] = states.get(row["phase"], True) and is_equal
    first = {} if found is None or found.kind != "operator" else found.rows[0]
    return [
        ModuleState(name, states, first["phase"] if first and module_of(first) == name else None)
        for name, states in equal.items()
    ]
