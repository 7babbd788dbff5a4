"""`accel-trainer runs [DIR]`: list all runs in a folder as a table, and mark the best.

A sweep is shown as one row, its best run.

example: accel-trainer runs runs --sort best
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.errors import OutputError
from ...core.json_files import read_json_object
from ..common.output import format_duration, format_number, format_table, tell
from ..common.parser import CommandParser
from .rows import Row
from .run_reader import RunReader, Runs, is_run, read_run

_COLUMNS = ("name", "data", "state", "step", "epoch", "metric", "best", "last", "samples/s", "wall")


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = CommandParser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="default: runs")
    parser.add_argument(
        "--sort",
        choices=_COLUMNS,
        default="name",
        help="the column to sort by, best first",
    )
    options = parser.parse_args(argv)
    rows = [_row(run) for run in find_runs(options.folder)]
    rows += [_sweep_row(name, runs) for name, runs in find_sweeps(options.folder).items()]
    if not rows:
        raise OutputError(
            "NO_RUNS", f"no runs in {options.folder}: give the folder that holds them"
        )
    winners = _winners(rows)
    cells = [
        ["*" if row["name"] in winners else " ", *(_show(column, row) for column in _COLUMNS)]
        for row in sorted(rows, key=lambda row: _sort_key(row, options.sort))
    ]
    tell(format_table([" ", *_COLUMNS], cells))
    return 0


def find_runs(folder: Path) -> list[RunReader]:
    """Return the runs in `folder`, or the run `folder` itself if it is one.

    A damaged run in `folder` is left out and named on stderr. Raises OutputError if `folder` is
    one itself.
    """
    found = []
    for place in run_folders(folder):
        try:
            run = read_run(place)
            _ = run.rows  # which may be damaged
            found.append(run)
        except OutputError as error:
            if place == folder:
                raise
            if is_run(place):
                tell(f"left out: {error.message}", file=sys.stderr)
    return found


def run_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that may be runs, or `folder` itself if it is one.

    Hidden ones are left out: a command may be filling them.
    """
    if is_run(folder):
        return [folder]
    return [path for path in sorted(folder.glob("[!.]*/")) if not path.is_symlink()]


def find_sweeps(folder: Path) -> dict[str, list[RunReader]]:
    """Return the runs of each sweep, or other folder of runs, in `folder`, by that one's name."""
    return {
        path.name: runs
        for path in run_folders(folder)
        if not is_run(path) and (runs := find_runs(path))
    }


def _sweep_row(name: str, runs: Runs) -> Row:
    """Return the row of the best run of a sweep."""
    rows = [_row(run) for run in runs]
    best = min(rows, key=lambda row: _sort_key(row, "best"))
    num_done = sum(row["state"] == "done" for row in rows)
    return {
        **best,
        "name": f"{name}/{best['name']}",
        "state": f"{num_done} of {len(rows)} done",
    }


def _row(run: RunReader) -> Row:
    metric = run.headline()
    newest = {**(run.rows[-1] if run.rows else {}), **run.ending}
    evaluations = run.evaluations()
    return {
        "name": run.name,
        "data": run.dataset,
        "fingerprint": _fingerprint_of_data(run),
        "state": run.state,
        "step": newest.get("optimizer_step"),
        "epoch": newest.get("epoch"),
        "metric": metric,
        "best": run.best_evaluation().get(metric) if metric else None,
        "last": evaluations[-1].get(metric) if metric and evaluations else None,
        "samples/s": newest.get("samples_per_s"),
        "wall": run.wall_s,
        "is_lower_better": metric is not None and run.is_lower_better(metric),
    }


def _fingerprint_of_data(run: RunReader) -> object:
    """Return it from the newest manifest as it is: to check it would import torch."""
    with suppress(OSError, ValueError):  # of `max` without a checkpoint
        newest = max(run.folder.glob("checkpoints/step-*/manifest.json"))
        return read_json_object(newest).get("data_fingerprint")
    return None


def _sort_key(row: Row, column: str) -> tuple[bool, float, str]:
    """Return a key that sorts texts and times upwards, other numbers from the best to the worst.

    Missing values and NaN come last.
    """
    value = row[column]
    if isinstance(value, str):
        return False, 0.0, value
    if not _is_known(value):
        return True, 0.0, row["name"]
    is_lower_first = column == "wall" or (column in ("best", "last") and row["is_lower_better"])
    return False, float(value) if is_lower_first else -float(value), row["name"]


def _winners(rows: Sequence[Row]) -> set[str]:
    """Return the names of the best runs, one for each dataset and metric of two runs or more."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if _is_known(row["best"]):
            key = repr((row["data"], row["fingerprint"], row["metric"]))
            groups.setdefault(key, []).append(row)
    return {
        min(group, key=lambda row: _sort_key(row, "best"))["name"]
        for group in groups.values()
        if len(group) > 1
    }


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _show(column: str, row: Row) -> str:
    value = row[column]
    if value is None:
        return ""
    if column == "wall":
        return format_duration(value)
    if column == "samples/s":
        return f"{value:,.0f}"
    if column in ("best", "last"):
        return format_number(row["metric"], value)
    return str(value)
