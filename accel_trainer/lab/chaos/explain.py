"""Finds where a run departs from its reference: the first thing that differs, and its cause."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_trainer.commands import (
    Difference,
    by_place,
    cause_of,
    difference_of_runs,
    files_with_status,
    lost_state,
    read_json_object,
    read_rows,
    read_run,
    shortened,
)

from .runs import Ending

_ROWS = "metrics.jsonl"
_MAX_FILES = 10_000
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
_ENGINE_ROWS = ("train/", "eval", "test/", "optim/")

Files = Mapping[str, tuple[int, int]]
"""The size and the time of the last change of each file below a folder."""


@dataclass(frozen=True)
class Departure:
    """`where` is the first tensor or number that differs at the end.

    `first` is the first number in the rows that differs, and `step` its step; None: no number does.
    """

    where: str
    first: str | None
    step: int | None
    cause: str


def explain(
    reference: Ending, ending: Ending, *, left_out: Collection[str], touched: Collection[str]
) -> Departure | None:
    """Return how a run differs from the reference; None if it does not.

    `left_out` are names in rows that are not compared, and `touched` are files that runs change in
    the current folder.
    """
    one, other = reference.run, ending.run
    where = difference_of_runs(one, other, left_out=left_out)
    if where is None:
        return None
    row = Difference.of(*(by_place(read_rows(run, left_out=left_out)) for run in (one, other)))
    step = first = None
    if row is not None:
        step, name = row.step, row.names[0]
        first = f"{name} of step {step}: " + "{} -> {}".format(*row.values(name))
    lost = _first_lost(reference.notes, ending.notes)
    if not ending.plan:
        cause = _why_not_repeated(one, other, lost, touched)
    elif touched and not lost:
        cause = f"{_changed(touched)}, and a resume does not undo that"
    elif not lost and ending.plan[-1].kind in _CAUSES:
        cause = _CAUSES[ending.plan[-1].kind]
    else:
        is_measured = where.startswith((_ROWS, "trainer.")) and "eval" in (first or "")
        cause = cause_of(_ROWS if is_measured else where, lost)
    return Departure(where, first, step, cause)


_CAUSES = {
    "workers": (
        "the usual cause is a sample that depends on its data worker, through get_worker_info or "
        "a generator of the dataset: draw with a global generator"
    ),
    "processes": (
        "the usual cause is code that depends on the process: on its rank, or on the samples "
        "that it has seen"
    ),
}


def _first_lost(one: Path, other: Path) -> list[str] | None:
    """Return the names of what differed at the first step at which anything did.

    None: nothing was noted that could be compared.
    """
    found = [lost_state(notes, other / notes.name) for notes in sorted(one.iterdir())]
    return next(filter(None, found), None if all(each is None for each in found) else [])


def _why_not_repeated(
    one: Path, other: Path, lost: list[str] | None, touched: Collection[str]
) -> str:
    """Return why two runs without faults differ."""
    fact = "the same command does not give the same result again"
    clock = "the time, a process id, the hash of a string, the order of a set"
    if touched:
        return f"{fact}: {_changed(touched)}"
    if read_run(one).data_fingerprint != read_run(other).data_fingerprint:
        return f"{fact}: the samples differ, as with {clock}: build the dataset without them"
    if operations := read_json_object(one / "result.json").get("nondeterministic_operations"):
        return f"{fact}: torch has no deterministic kernel for {', '.join(operations)}"
    if lost:
        return f"{fact}, and {shortened(sorted(lost))} differs: the usual causes are {clock}"
    return (
        f"{fact}: the usual causes are a model built before start_run, which seeds the generators, "
        f"{clock}"
    )


def _changed(touched: Collection[str]) -> str:
    return f"a run changes {shortened(sorted(touched))} in the current folder"


def own_numbers_that_vary(reference: Ending, again: Ending) -> set[str]:
    """Return the names of callbacks' numbers, such as times, that differ in a second run."""
    mine, its = (by_place(read_rows(each.run)) for each in (reference, again))
    return {
        name
        for place, row in mine.items()
        for name in row
        if "/" in name
        and not name.startswith(_ENGINE_ROWS)
        and row[name] != its.get(place, {}).get(name)
    }


def files_below(folder: Path) -> Files:
    """Return the files below a folder, at most some thousands, without hidden ones."""
    found: dict[str, tuple[int, int]] = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        for name in names:
            file = Path(path, name)
            if name[0] == ".":
                continue
            for status in files_with_status(file).values():
                found[str(file.relative_to(folder))] = status.st_size, status.st_mtime_ns
        if len(found) > _MAX_FILES:
            break
    return found


def touched_files(before: Files, after: Files) -> list[str]:
    """Return the files that have changed or are new."""
    return sorted(name for name, file in after.items() if before.get(name) != file)
