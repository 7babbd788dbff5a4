"""The two trainings that are compared: recorded runs, each trained again here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.format import step_of
from ..replay.replay import STEP_DIGESTS, STOP, Replay, errors_of_failures
from ..runs.difference import Difference
from ..runs.rows import Rows, by_place, read_digests, read_rows, shared
from .records import compare_checkpoints, first_difference, of_checkpoints


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
    steps: Rows
    from_record: Difference | None
    """The first row that is not as the run has recorded it; None: it repeats the run."""

    def difference_to(self, other: Retrained) -> Difference | None:
        """Return the first step of both after which digests differ."""
        return Difference.of(*shared(self.steps, other.steps))


def retrain(side: Side, folder: Path, *, until: int) -> Retrained:
    """Train a side up to step `until`, and compare it with what its run has recorded."""
    side.train(folder, until=until, callbacks=(STEP_DIGESTS,))
    run = side.replay.run.folder
    rows = [by_place(read_rows(each, after=side.begin, until=until)) for each in (run, folder)]
    found = first_difference(*rows)
    for step, is_equal in compare_checkpoints(run, folder):
        if found is None and not is_equal:
            found = of_checkpoints(step)
    return Retrained(side, folder, read_digests(folder), found)
