"""A callback that writes the digests after every step of a replay into `steps.jsonl`."""

from __future__ import annotations

import hashlib
import json

import torch

from accel_trainer import Callback, StepReport, TrainerView
from accel_trainer.commands import filesystem


class StepDigests(Callback):
    """Writes a JSON object for each step: its number, and digests by the name of the part.

    `samples` covers all processes, and does not depend on the order.
    """

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the file on the main process."""
        self._file = None
        if trainer.accelerator.is_main_process:
            self._file = filesystem.AppendFile(trainer.log.folder / "steps.jsonl")

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write the digests. **Collective. Host sync.**"""
        digests = trainer.digests()
        accelerator = trainer.accelerator
        own = torch.cat(list(report.sample_ids)).to(accelerator.device)
        padded = accelerator.pad_across_processes(own, pad_index=-1)
        ids = sorted(each for each in accelerator.gather(padded).tolist() if each >= 0)
        if self._file is not None:
            digests["samples"] = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
            place = {"event": "step", "optimizer_step": report.optimizer_step}
            self._file.append(json.dumps({**place, **digests}).encode() + b"\n")
