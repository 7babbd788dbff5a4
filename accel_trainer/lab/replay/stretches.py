"""The stretches in which a whole run is trained again, so that its rows are as if logged live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_trainer.commands import Row, complete_by_step, last_step

from .proof import Proof
from .replay import Replay

_MOST = 16


@dataclass(frozen=True)
class Stretch:
    """The steps after `after` up to `until`."""

    after: int
    until: int
    is_end: bool = False
    """Whether the run was done after `until`, so that its last evaluation is also repeated."""


@dataclass(frozen=True)
class Logged:
    """A stretch that was trained again: its rows, and how they compare with those of the run."""

    stretch: Stretch
    rows: Sequence[Row]
    proof: Proof


def plan(
    replay: Replay, *, every: int, first: int = 1, last: int | None = None, in_one: bool = False
) -> list[Stretch]:
    """Return stretches that cover the steps from `first` to `last` (None: the last of the run).

    There is a row every `every` steps, and each stretch but the first begins at a checkpoint. A
    checkpoint lacks what new callbacks would have logged since the last row before it. Each stretch
    therefore runs past the next checkpoint up to the next row, and the following stretch counts
    only the rows after that one. `in_one`: a single stretch from the start of the run.
    """
    end = last_step(replay.run)
    last = end if last is None else min(last, end)
    begin = replay.begin
    points = [begin if in_one else max(begin, (first - 1) // every * every)]
    for step in [] if in_one else complete_by_step(replay.run.folder):
        row = (step // every + 1) * every
        if row < last and row - points[-1] >= max(1, (end - begin) / _MOST):
            points.append(row)
    result = replay.run.result
    was_done = result.get("state") in ("done", "stopped")
    done_at = result.get("optimizer_step") if was_done else None
    ends = [*points[1:], last]
    return [
        Stretch(after, until, is_end=until == done_at)
        for after, until in zip(points, ends, strict=True)
    ]


def latest_start(replay: Replay, stretch: Stretch) -> int:
    """Return the last step whose checkpoint a stretch may begin at."""
    is_first = stretch.after <= replay.begin
    return stretch.after if is_first else stretch.after - 1


def num_steps(replay: Replay, stretch: Stretch) -> int:
    """Return how many steps are trained for a stretch."""
    return stretch.until - replay.begin_after(latest_start(replay, stretch))
