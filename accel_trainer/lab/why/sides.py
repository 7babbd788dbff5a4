"""The two trainings that are compared: recorded runs, each trained again here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel_trainer.commands import Difference, Rows, by_place

from ..replay.replay import STEP_DIGESTS, STOP, Callbacks, Replay, Trained
from ..rows import read_digests, shared
from .records import compare_checkpoints, of_checkpoints


@dataclass(frozen=True)
class Side:
    """A way to train a recorded run again."""

    name: str
    replay: Replay
    after: int
    """It begins at the newest checkpoint at or before this step; 0: the start."""

    @property
    def begin(self) -> int:
        """The step at which it begins."""
        return self.replay.begin_after(self.after)

    def train(self, folder: Path, *, until: int, callbacks: Callbacks) -> Trained:
        """Train up to step `until` in the new `folder`, watched by `callbacks`.

        Raises:
            OutputError: the recipe failed; its errors were printed.
        """
        return self.replay.train(
            folder, until=until, after=self.after, callbacks={**callbacks, **STOP}
        )


@dataclass(frozen=True)
class Retrained:
    """A side that was trained, with the digests after each of its steps."""

    side: Side
    folder: Path
    steps: Rows
    from_record: Difference | None
    """The first row that is not as the run has recorded it; None: it repeats the run."""

    def difference_to(self, other: Retrained) -> Difference | None:
        """Return the first step of both after which digests differ."""
        return Difference.of(*shared(self.steps, other.steps))


def retrain(side: Side, folder: Path, *, until: int) -> Retrained:
    """Train a side up to step `until`, and compare it with what its run has recorded."""
    trained = side.train(folder, until=until, callbacks=STEP_DIGESTS)
    found = Difference.of(*shared(*map(by_place, trained.rows())))
    for step, is_equal in compare_checkpoints(trained.run, folder):
        if found is None and not is_equal:
            found = of_checkpoints(step)
    return Retrained(side, folder, read_digests(folder), found)
