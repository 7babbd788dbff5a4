"""The two trainings that are compared: recorded runs, each trained again here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint.format import step_of
from ...core.filesystem import read_lines
from ..replay.replay import STEP_DIGESTS, STOP, Replay, errors_of_failures
from .records import RowDifference, compare_checkpoints, first_difference, rows_of


@dataclass(frozen=True)
class Side:
    """A way to train a recorded run again."""

    name: str
    replay: Replay
    after: int
    """It begins at the newest checkpoint at or before this step; 0: the start."""
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """The step at which it begins."""
        checkpoint = self.replay.checkpoint_at(self.after)
        return 0 if checkpoint is None else step_of(checkpoint)

    def train(
        self,
        folder: Path,
        *,
        until: int,
        callbacks: Sequence[Path],
        variables: Mapping[str, str] | None = None,
    ) -> Path:
        """Train up to step `until`, watched by `callbacks`, and return the new `folder`.

        Raises:
            OutputError: the recipe failed; its errors were printed.
        """
        with errors_of_failures() as errors:
            self.replay.train(
                folder,
                until=until,
                after=self.after,
                callbacks=(*callbacks, STOP),
                flags=self.flags,
                variables={**self.variables, **(variables or {})},
                errors=errors,
            )
        return folder


@dataclass(frozen=True)
class Retrained:
    """A side that was trained, with the digests after each of its steps."""

    side: Side
    folder: Path
    steps: Mapping[int, Mapping[str, Any]]
    from_record: RowDifference | None
    """The first row that is not as the run has recorded it; None: it repeats the run."""


def retrain(side: Side, folder: Path, *, until: int) -> Retrained:
    """Train a side up to step `until`, and compare it with what its run has recorded."""
    side.train(folder, until=until, callbacks=(STEP_DIGESTS,))
    run = side.replay.run.folder
    rows = [rows_of(each, after=side.begin, until=until) for each in (run, folder)]
    found = first_difference(rows[0], rows[1])
    for step, is_equal in compare_checkpoints(run, folder):
        if found is None and not is_equal:
            found = RowDifference(step, "checkpoint", ["checkpoint"], (None, None), 0)
    return Retrained(side, folder, _digests_in(folder), found)


def first_step_of(folders: Sequence[Path]) -> int | None:
    """Return the first step after which two replays with digests differ."""
    one, other = map(_digests_in, folders)
    steps = sorted(one.keys() & other.keys())
    return next((step for step in steps if one[step] != other[step]), None)


def _digests_in(folder: Path) -> dict[int, dict[str, Any]]:
    rows = map(json.loads, read_lines(folder / "steps.jsonl"))
    return {row.pop("optimizer_step"): row for row in rows}


def first_step(one: Retrained, other: Retrained) -> tuple[int, list[str]] | None:
    """Return the first step of both after which digests differ, and the parts that do."""
    for step in sorted(one.steps.keys() & other.steps.keys()):
        mine, theirs = one.steps[step], other.steps[step]
        if parts := [name for name in mine if mine[name] != theirs.get(name)]:
            return step, parts
    return None
