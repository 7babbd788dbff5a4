"""A thread beside the training that notices what the training cannot: that it is stuck, or its launcher dead."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from .errors import ExitCode
from .preemption import StopFlag
from .state import TrainState

_INTERVAL_S = 0.5
# How long to wait for others is limited by the collectives' timeout. A little later, those that wait
# have ended with that error, and a process that still does not move is the one they waited for.
_GRACE_S = 3.0
# The start, the end and the disk may take as long as they need.
_WATCHED = ("training", "evaluation", "save")


class Watchdog:
    """Ends a process that makes no progress for `timeout_s`, and stops it in good order if its launcher dies.

    The training says where it is by setting `phase`, once per epoch, and `position`, once. Progress is a change of
    `num_forwards` or of the stop flag's count of polls, one per step and evaluated batch.
    `on_stuck` gets the stacks of all threads and returns the last line of a process that is stuck.
    """

    def __init__(
        self, stop_flag: StopFlag, *, timeout_s: float = float("inf"), launcher_pid: int | None = None
    ) -> None:
        self.stop_flag = stop_flag
        self.phase_s: dict[str, float] = {}
        """Seconds spent in each phase that has ended."""
        self._phase, self._phase_start_s = "start", time.monotonic()
        self.position, self.num_forwards = TrainState(), 0
        self.on_stuck: Callable[[float, str], str] = lambda stuck_s, stacks: stacks
        self._timeout_s, self._launcher_pid = timeout_s + _GRACE_S, launcher_pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def phase(self) -> str:
        """What the training is doing."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        now_s = time.monotonic()
        self.phase_s[self._phase] = self.phase_s.get(self._phase, 0.0) + now_s - self._phase_start_s
        self._phase, self._phase_start_s = phase, now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what the block does. After an error the name stays: that is where it happened."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def _watch(self) -> None:
        seen, idle_s = (self.phase, 0), 0.0
        while not self._is_over.wait(_INTERVAL_S):
            if self._launcher_pid not in (None, os.getppid()):
                self._launcher_pid = None
                os.kill(os.getpid(), signal.SIGTERM)
            now = (self.phase, self.stop_flag.num_polls + self.num_forwards)
            # Counted in own intervals, not by a clock: while the whole process is suspended, none passes.
            idle_s = idle_s + _INTERVAL_S if now == seen and self.phase in _WATCHED else 0.0
            seen = now
            if idle_s > self._timeout_s:
                line = self.on_stuck(idle_s, _stacks())
                os.write(sys.stderr.fileno(), f"accel_trainer: {line}\n".encode())
                os._exit(ExitCode.INTERNAL)


def _stacks() -> str:
    """Return where each thread of this process is."""
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
