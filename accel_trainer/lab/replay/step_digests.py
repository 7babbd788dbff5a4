"""A callback that writes the digests after every step of a replay into `steps.jsonl`."""

from __future__ import annotations

import hashlib
import json

from accel_trainer import Callback, StepReport, TrainerView
from accel_trainer.commands import filesystem


class StepDigests(Callback):
    """Writes a JSON object for each step: its number, and digests by the name of the part.

    `samples` covers the samples of the main process.
    """

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the file on the main process."""
        self._file = None
        if trainer.accelerator.is_main_process:
            self._file = filesystem.AppendFile(trainer.log.folder / "steps.jsonl")

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write the digests. **Collective** with shards. **Host sync.**"""
        digests = trainer.digests()
        if self._file is not None:
            ids = sorted(each for ids in report.sample_ids for each in ids.tolist())
            digests["samples"] = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
            place = {"event": "step", "optimizer_step": report.optimizer_step}
            self._file.append(json.dumps({**place, **digests}).encode() + b"\n")
