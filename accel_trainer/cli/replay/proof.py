"""Compares the rows of a replay with those of the run: what is equal, and what differs first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

SINCE_LAST_ROW = "digest/samples"
"""The samples since the row before it, in the rows of runs before `digest/samples_so_far`."""


@dataclass(frozen=True)
class Proof:
    """How the rows that a run and its replay both have compare."""

    num_rows: int = 0
    num_digests: int = 0
    first_difference: str | None = None
    """The first value that differs; None: all that were compared are equal."""

    def __add__(self, later: Proof) -> Proof:
        """Return the comparison of two stretches, `later` being the one of the later steps."""
        return Proof(
            self.num_rows + later.num_rows,
            self.num_digests + later.num_digests,
            self.first_difference or later.first_difference,
        )

    def __str__(self) -> str:
        if self.first_difference is not None:
            return f"DIFFERENT from the run: {self.first_difference}"
        if not self.num_rows:
            return "the run has no row on the way, so nothing could be compared"
        equal = f"{self.num_rows} of {self.num_rows} rows on the way are equal"
        if not self.num_digests:
            return equal
        return f"{self.num_digests} of {self.num_digests} digests and {equal}"


def compare(recorded: Iterable[Row], replayed: Iterable[Row]) -> Proof:
    """Compare rows without what differs by machine, as `comparable_rows` yields them.

    Names that only one of two rows has are passed over: other callbacks have logged them.
    """
    again = {(row["event"], row["optimizer_step"]): row for row in replayed}
    last = max((step for _, step in again), default=0)
    num_rows = num_digests = 0
    for row in recorded:
        place = (row["event"], row["optimizer_step"])
        if place not in again:
            if row["optimizer_step"] >= last:
                continue  # a replay ends without the evaluation of its last step
            fact = f"the {place[0]} row of step {place[1]} is missing"
            return Proof(num_rows, num_digests, fact)
        shared = row.keys() & again[place].keys()
        for name in sorted(shared):
            if row[name] != again[place][name]:
                change = f"{name} {row[name]} -> {again[place][name]}"
                return Proof(num_rows, num_digests, f"step {place[1]}, {change}")
        num_rows += 1
        num_digests += sum(name.startswith("digest/") for name in shared)
    return Proof(num_rows, num_digests)


def of_other_intervals(recorded: Iterable[Row], replayed: Iterable[Row]) -> Iterator[Row]:
    """Yield what can be compared of the rows of a run whose replay has rows at other steps."""
    places = {(row["event"], row["optimizer_step"]) for row in replayed}
    for row in recorded:
        place = {name: row[name] for name in ("event", "optimizer_step")}
        if tuple(place.values()) in places and (values := of_the_step(row)):
            yield {**place, **values}


def of_the_step(row: Row) -> Row:
    """Return what a row says of its step: a row of training has means since the row before."""
    if row["event"] != "train":
        return row
    names = [name for name in row if name.startswith("digest/")]
    return {name: row[name] for name in names if name != SINCE_LAST_ROW}
