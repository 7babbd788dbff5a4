"""`attempts.jsonl`: each start of a run, from which step, and of each orderly end where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..history import History
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer


class AttemptLog(Callback):
    """Appends a row when this process starts to train and one when it ends, on the main process.

    A start without an end was killed. No checkpoint holds these rows: they tell of the interruptions, which
    what is trained does not depend on. `show` is told how the attempt before this one ended.
    """

    def __init__(self, path: Path, *, show: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._show = path, show
        self._history: History | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Note the start, unless there is nothing left to train."""
        if trainer.accelerator.is_main_process and not trainer.is_finished:
            self._history = History(self._path)
            if (last := self._last()) is not None:
                ending = "was killed" if last.get("event") == "start" else f"ended as {last.get('state')}"
                self._show(f"the attempt before this one {ending}")
            self._write("start", trainer, {"num_processes": trainer.accelerator.num_processes})

    def _last(self) -> dict[str, Any] | None:
        """Return the last row; None if there is none, or none that can be read."""
        assert self._history is not None
        last = None
        with suppress(OSError, ValueError):
            for row, _ in self._history.read(0):
                last = row
        return last if isinstance(last, dict) else None

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """Note how it ended, and the seconds spent in each phase."""
        if self._history is not None:
            self._write("end", trainer, {"state": result.state, "phase_s": trainer.watchdog.phase_s})
            self._history.close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Close the file."""
        if self._history is not None:
            self._history.close()

    def _write(self, event: str, trainer: Trainer, values: Mapping[str, Any]) -> None:
        assert self._history is not None
        row = {"event": event, "time": time.time(), "optimizer_step": trainer.state.optimizer_step}
        self._history.append({**row, **values})
