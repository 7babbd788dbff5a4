"""A callback that writes hashes of state at each checkpoint, for comparing two runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_trainer.checks.unsaved_state import mark_unsaved
from accel_trainer.core.json_files import write_json
from accel_trainer.run.extra_callbacks import Observer
from accel_trainer.training.callback import TrainerView

UNSAVED = __file__
"""This file of callbacks, for a `Start`: it writes what `lost_state` compares."""


def file_of(folder: Path, step: int) -> Path:
    """Return the file of a step."""
    return folder / f"unsaved-{step:08}.json"


class UnsavedState(Observer):
    """Writes them into `folder` as a run starts or resumes, and with each checkpoint."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def see_parts(self, parts: Mapping[str, Any]) -> None:
        """Keep the objects whose state is written."""
        self._parts = parts

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the state that a resume begins with."""
        self._record(trainer, is_start=True)

    def on_checkpoint(self, trainer: TrainerView, name: str) -> None:
        """Record the state that a resume from here loses."""
        self._record(trainer, is_start=False)

    def _record(self, trainer: TrainerView, *, is_start: bool) -> None:
        stored = {f"{name} as loaded": digest for name, digest in trainer.digests().items()}
        if not trainer.accelerator.is_main_process:
            return
        marks = mark_unsaved(self._parts, model=self._parts["model"])
        hashes = {
            name: hashlib.sha256(repr(mark).encode()).hexdigest() for name, mark in marks.items()
        }
        record = {"is_start": is_start, "unsaved": hashes, "stored": stored}
        write_json(file_of(self._folder, trainer.state.optimizer_step), record)
