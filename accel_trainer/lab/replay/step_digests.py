"""A callback that writes the digests after every step of a replay into `steps.jsonl`."""

from __future__ import annotations

from accel_trainer.callbacks.metrics_file import MetricsFile
from accel_trainer.core.callback import Callback, TrainerView
from accel_trainer.core.digest import samples_digest, sum_of_samples
from accel_trainer.core.types import StepReport


class StepDigests(Callback):
    """Writes a JSON object for each step: its number, and digests by the name of the part.

    `samples` covers the samples of the main process.
    """

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the file on the main process."""
        self._file = None
        if trainer.accelerator.is_main_process:
            self._file = MetricsFile(trainer.log.folder / "steps.jsonl")

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Write the digests. **Collective** with shards. **Host sync.**"""
        digests = trainer.digests()
        if self._file is not None:
            parts = [(report.optimizer_step, ids) for ids in report.sample_ids]
            digests["samples"] = samples_digest(sum_of_samples(parts))
            place = {"event": "step", "optimizer_step": report.optimizer_step}
            self._file.append({**place, **digests})
