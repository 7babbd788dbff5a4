"""A thread that notices when training is stuck or its launcher is dead."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import ExitCode
from ..core.train_state import TrainState
from .preemption import StopFlag

_INTERVAL_S = 0.5
# The collectives' timeout limits how long a process waits for others. A little later those that waited have ended with
# that error, and a process that still makes no progress is the one they waited for.
_GRACE_S = 3.0
# The start, the end and the disk may take as long as they need.
_WATCHED = ("training", "evaluation", "save")


class Watchdog:
    """Ends a process that makes no progress for `timeout_s`, and stops it cleanly if its launcher dies.

    The trainer sets `phase`, and `position` once. Progress is a change of `num_forwards`, or of the stop flag's count
    of polls: one per step and evaluated batch. `on_stuck` gets the seconds, and returns the last line that a
    stuck process prints, after the stacks of its threads.
    """

    def __init__(
        self, stop_flag: StopFlag, *, timeout_s: float = float("inf"), launcher_pid: int | None = None
    ) -> None:
        self.stop_flag = stop_flag
        self.phase_s: dict[str, float] = {}
        """Seconds spent in each phase that has ended."""
        self._phase, self._phase_start_s = "start", time.monotonic()
        self.position, self.num_forwards = TrainState(), 0
        self.on_stuck: Callable[[float], str] = lambda stuck_s: f"stuck for {stuck_s:.0f} s"
        self._timeout_s, self._launcher_pid = timeout_s + _GRACE_S, launcher_pid
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_done.set()
        self._thread.join()

    @property
    def phase(self) -> str:
        """What the process is doing."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        now_s = time.monotonic()
        self.phase_s[self._phase] = self.phase_s.get(self._phase, 0.0) + now_s - self._phase_start_s
        self._phase, self._phase_start_s = phase, now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase for the block. After an error it stays: that is where the error happened."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def _watch(self) -> None:
        seen, idle_s = (self.phase, 0), 0.0
        while not self._is_done.wait(_INTERVAL_S):
            if self._launcher_pid not in (None, os.getppid()):
                self._launcher_pid = None
                os.kill(os.getpid(), signal.SIGTERM)
            now = (self.phase, self.stop_flag.num_polls + self.num_forwards)
            # Counted in intervals of this thread, not by a clock: none passes while the process is suspended.
            idle_s = idle_s + _INTERVAL_S if now == seen and self.phase in _WATCHED else 0.0
            seen = now
            if idle_s > self._timeout_s:
                faulthandler.dump_traceback()
                line = self.on_stuck(idle_s)
                os.write(sys.stderr.fileno(), f"accel_trainer: {line}\n".encode())
                os._exit(ExitCode.INTERNAL)
