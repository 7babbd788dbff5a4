"""The checkpoints of a run that are complete, by their steps."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.format import is_committed, list_checkpoints, step_of
from .run_reader import RunReader


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, in the order of their positions.

    A step that ends an epoch may have two: before and after the evaluation.
    """
    return [path for path in list_checkpoints(run / "checkpoints") if is_committed(path)]


def checkpoints_by_step(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by their steps, the newest of each."""
    return {step_of(path): path for path in complete_checkpoints(run)}


def last_step(run: RunReader) -> int:
    """Return the last step that the run has recorded; 0: none."""
    steps = [int(row["optimizer_step"]) for row in run.rows]
    return max([*steps, *checkpoints_by_step(run.folder)], default=0)
