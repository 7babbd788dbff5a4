"""What a run folder holds, read once for all checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checkpoint.format import (
    LoadedCheckpoint,
    decode_files,
    list_checkpoints,
    read_files,
    step_of,
)
from ...checkpoint.sharded import load_all
from ...cli.runs.run_reader import RunReader
from ...core.errors import CheckpointError
from ...core.history import read_history
from ...core.json_files import read_json_object

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """A run, with its rows as they are in the file and its checkpoints by their names."""

    run: RunReader

    @cached_property
    def rows(self) -> Sequence[Row]:
        """All rows, in the order of the file; NaN and inf are strings."""
        folder = self.run.folder
        return [*read_history(folder)] if (folder / "metrics.jsonl").exists() else []

    @property
    def names(self) -> list[str]:
        """The names of the checkpoints, in the order of their positions."""
        return [path.name for path in list_checkpoints(self._directory)]

    @property
    def _directory(self) -> Path:
        return self.run.folder / "checkpoints"

    def checkpoint(self, name: str) -> LoadedCheckpoint:
        """Return a checkpoint with the manifest's hashes. Raises CheckpointError."""
        return load_verified(self._directory / name)

    @cached_property
    def manifests(self) -> dict[str, Mapping[str, Any]]:
        """The manifests of the checkpoints that are not damaged, by name."""
        found = {}
        for name in self.names:
            try:
                found[name] = self.checkpoint(name).manifest
            except CheckpointError:
                continue  # the check of the checkpoints says so
        return found

    @property
    def newest(self) -> str | None:
        """The name of the newest checkpoint that is not damaged."""
        return next(reversed(self.manifests), None)

    @cached_property
    def is_result_current(self) -> bool:
        """Whether `result.json` is of the end of this run: it may have been continued since."""
        ended = self.run.result.get("optimizer_step")
        return ended is not None and (self.newest is None or ended >= step_named(self.newest))

    @cached_property
    def best(self) -> Mapping[str, Any] | None:
        """What `checkpoints/best.json` says, None without one. Raises OSError or ValueError."""
        path = self._directory / "best.json"
        return read_json_object(path) if path.exists() else None

    def evaluation_until(self, step: int) -> Row:
        """Return the last row of an evaluation at or before `step`; empty if there is none."""
        found = [
            row for row in self.rows if row["event"] == "eval" and row["optimizer_step"] <= step
        ]
        return found[-1] if found else {}


def load_verified(path: Path) -> LoadedCheckpoint:
    """Return a checkpoint whose tensors are read and have their hashes. Raises CheckpointError."""
    loaded = decode_files(read_files(path), path)
    return LoadedCheckpoint(loaded.name, loaded.manifest, load_all(loaded.pieces))


def step_named(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return step_of(Path(name))


def as_in_rows(value: Any) -> Any:
    """Return a number as rows hold it: NaN and inf are texts there."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
