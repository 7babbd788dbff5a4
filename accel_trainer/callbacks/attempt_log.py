"""`attempts.jsonl`: each start of a run with its step, and each orderly end with the seconds of each phase."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.callback import Callback, RunResult, TrainerView
from .metrics_file import MetricsFile


class AttemptLog(Callback):
    """Appends a row when this process starts to train and one when it ends, on the main process.

    A start without an end was killed. No checkpoint holds these rows, since what is trained does not depend on
    interruptions. `show` gets a line on how the previous attempt ended.
    """

    def __init__(
        self, path: Path, *, phase_s: Mapping[str, float], show: Callable[[str], None] = lambda text: None
    ) -> None:
        self._path, self._phase_s, self._show = path, phase_s, show
        self._history: MetricsFile | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the start, unless there is nothing left to train."""
        if trainer.accelerator.is_main_process and not trainer.is_finished:
            self._history = MetricsFile(self._path)
            last: deque[Any] = deque(maxlen=1)
            with suppress(OSError, ValueError):
                last.extend(row for row, _ in self._history.read(0))
            if last and isinstance(last[0], dict):
                ending = "was killed" if last[0].get("event") == "start" else f"ended as {last[0].get('state')}"
                self._show(f"the attempt before this one {ending}")
            self._write("start", trainer, {"num_processes": trainer.accelerator.num_processes})

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Record how it ended, and the seconds spent in each phase."""
        if self._history is not None:
            self._write("end", trainer, {"state": result.state, "phase_s": dict(self._phase_s)})
            self._history.close()

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Close the file."""
        if self._history is not None:
            self._history.close()

    def _write(self, event: str, trainer: TrainerView, values: Mapping[str, Any]) -> None:
        assert self._history is not None
        row = {"event": event, "time": time.time(), "optimizer_step": trainer.state.optimizer_step}
        self._history.append({**row, **values})
