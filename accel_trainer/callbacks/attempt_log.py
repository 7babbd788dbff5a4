"""`attempts.jsonl`: each start of a run with its step, and each orderly end with the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..core.callback import Callback, RunResult, TrainerView
from .metrics_file import MetricsFile


class AttemptLog(Callback):
    """Appends a row when this process starts to train and one when it ends, on the main process.

    A start without an end was killed. No checkpoint holds these rows, since what is trained does not depend on
    interruptions.
    """

    def __init__(self, path: Path, *, phase_s: Mapping[str, float]) -> None:
        self._path, self._phase_s, self._is_on = path, phase_s, False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the start, unless there is nothing left to train."""
        self._is_on = trainer.accelerator.is_main_process and not trainer.is_finished
        self._write("start", trainer, {"num_processes": trainer.accelerator.num_processes})

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Record how it ended, and the seconds spent in each phase."""
        self._write("end", trainer, {"state": result.state, "phase_s": dict(self._phase_s)})

    def _write(self, event: str, trainer: TrainerView, values: Mapping[str, Any]) -> None:
        if self._is_on:
            row = {"event": event, "time": time.time(), "optimizer_step": trainer.state.optimizer_step}
            with closing(MetricsFile(self._path)) as file:
                file.append({**row, **values})
