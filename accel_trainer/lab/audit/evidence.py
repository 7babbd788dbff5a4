"""What a run folder holds, read once for all checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_trainer import CheckpointError, read_history
from accel_trainer.commands import (
    LoadedCheckpoint,
    Row,
    RunReader,
    StoredCheckpoint,
    checkpoints_in,
    read_json_object,
)

_BY_HOURS = {"trainer.hours", "trainer.num_steps", "schedule.decay_at"}


@dataclass(frozen=True)
class Evidence:
    """A run, with its rows as they are in the file and its checkpoints by their names."""

    run: RunReader

    @cached_property
    def rows(self) -> Sequence[Row]:
        """All rows, in the order of the file; NaN and inf are strings."""
        folder = self.run.folder
        return [*read_history(folder)] if (folder / "metrics.jsonl").exists() else []

    @cached_property
    def checkpoints(self) -> dict[str, StoredCheckpoint]:
        """All checkpoints by their names, in the order of their positions."""
        return {each.name: each for each in checkpoints_in(self.run.folder)}

    def load(self, name: str) -> LoadedCheckpoint:
        """Return a checkpoint whose tensors have the hashes of its manifest.

        Raises:
            CheckpointError: it is damaged.
        """
        return self.checkpoints[name].read()

    @cached_property
    def manifests(self) -> dict[str, Mapping[str, Any]]:
        """The manifests of the checkpoints that are not damaged, by name."""
        found = {}
        for name in self.checkpoints:
            try:
                found[name] = self.load(name).manifest
            except CheckpointError:
                continue  # the check of the checkpoints reports it
        return found

    @property
    def newest(self) -> str | None:
        """The name of the newest checkpoint that is not damaged."""
        return next(reversed(self.manifests), None)

    def settings_of(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in a manifest, without what `--hours` decides; empty: it has none.

        The checkpoints of such a run have the hours, and those of its replays what these decided.
        """
        stored = manifest.get("settings")
        settings = dict(stored) if isinstance(stored, Mapping) else {}
        if (self.run.config.get("trainer") or {}).get("hours") is not None:
            settings = {name: settings[name] for name in sorted(settings.keys() - _BY_HOURS)}
        return settings

    @cached_property
    def is_result_current(self) -> bool:
        """Whether `result.json` is of the end of this run, which may have been continued since."""
        ended = self.run.result.get("optimizer_step")
        return ended is not None and (self.newest is None or ended >= step_named(self.newest))

    @cached_property
    def best(self) -> Mapping[str, Any] | None:
        """The contents of `checkpoints/best.json`; None: no file. Raises OSError or ValueError."""
        path = self.run.folder / "checkpoints" / "best.json"
        return read_json_object(path) if path.exists() else None

    def evaluation_until(self, step: int) -> Row:
        """Return the last row of an evaluation at or before `step`; empty if there is none."""
        found = [
            row for row in self.rows if row["event"] == "eval" and row["optimizer_step"] <= step
        ]
        return found[-1] if found else {}


def step_named(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return StoredCheckpoint(Path(name)).step
