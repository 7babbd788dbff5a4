"""What a process is doing: its phase, how far its run has come, and its number of forwards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.timing import Stopwatch
from ..core.train_state import TrainState


class Activity:
    """What a process is doing, as read by the watchdog's thread and by error reports.

    The trainer sets `state`, and its steps count `num_forwards`. `phase_s` holds the seconds
    spent in each phase so far, without the current stay in `phase`. `compilation` counts the
    seconds of compiling the model. `couples_batch` is copied from the task. `result` is the
    RunResult at the end.
    """

    def __init__(self) -> None:
        self.state = TrainState()
        self.num_forwards = 0
        self.couples_batch: bool | str = False
        self.phase_s: dict[str, float] = defaultdict(float)
        self.compilation = Stopwatch()
        self.result: Any = None
        self._phase = "start"
        self._phase_start_s = time.monotonic()

    @property
    def phase(self) -> str:
        """The current phase; assigning one adds the time since the last assignment to `phase_s`.

        One of `start`, `training`, `evaluation`, `save` and `disk`, or how the run ended.
        """
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        now_s = time.monotonic()
        self.phase_s[self._phase] += now_s - self._phase_start_s
        self._phase = phase
        self._phase_start_s = now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase for the block.

        An error keeps the phase, so that its report tells where it happened.
        """
        before = self._phase
        self.phase = phase
        yield
        self.phase = before
