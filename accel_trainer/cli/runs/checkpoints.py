"""The checkpoints of a run, by their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.format import (
    LoadedCheckpoint,
    Manifest,
    decode_files,
    is_committed,
    list_checkpoints,
    read_files,
    read_manifest,
    step_of,
)
from ...checkpoint.sharded import load_all
from .run_reader import RunReader


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the folder of a run, valid or not."""

    path: Path

    @property
    def name(self) -> str:
        """Its name, which begins with its step."""
        return self.path.name

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return step_of(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether it was written as a whole."""
        return is_committed(self.path)

    def read_manifest(self) -> Manifest:
        """Return its header: the hashes of its files, and what decided the training.

        Raises:
            CheckpointError: it is damaged.
        """
        return read_manifest(self.path)[1]

    def read(self) -> LoadedCheckpoint:
        """Return it with all tensors, whose hashes are verified. Raises CheckpointError."""
        loaded = decode_files(read_files(self.path), self.path)
        return LoadedCheckpoint(loaded.name, loaded.manifest, load_all(loaded.pieces))


def checkpoints_in(run: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints in the folder of a run, valid or not, in the order of their positions.

    A step that ends an epoch may have two: before and after the evaluation.
    """
    return [StoredCheckpoint(path) for path in list_checkpoints(run / "checkpoints")]


def complete_by_step(run: Path) -> Mapping[int, StoredCheckpoint]:
    """Return the complete checkpoints in the folder of a run by their steps, the newest of each."""
    return {each.step: each for each in checkpoints_in(run) if each.is_complete}


def last_step(run: RunReader) -> int:
    """Return the last step that the run has recorded; 0: none."""
    steps = [int(row["optimizer_step"]) for row in run.rows]
    return max([*steps, *complete_by_step(run.folder)], default=0)
