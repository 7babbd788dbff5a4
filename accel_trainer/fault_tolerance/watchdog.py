"""A thread that notices when training is stuck or its launcher is dead."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable

from ..core.activity import Activity
from ..core.errors import ExitCode
from .preemption import StopFlag

_INTERVAL_S = 0.5
# The collectives' timeout limits how long a process waits for others. A little later those that
# waited have ended with that error, and a process that still makes no progress is the one they
# waited for.
_GRACE_S = 3.0
# The start, the end and the disk may take as long as they need.
_WATCHED = ("training", "evaluation", "save")


class Watchdog:
    """Ends a process that makes no progress for `timeout_s`, and stops it cleanly if its launcher dies.

    Progress is a change of the count of forwards, or of the stop flag's count of polls: one per
    step and evaluated batch. `on_stuck` gets the seconds, and returns the last line that a stuck
    process prints, after the stacks of its threads.
    """

    def __init__(
        self, activity: Activity, stop_flag: StopFlag, *, timeout_s: float, launcher_pid: int | None
    ) -> None:
        self._activity = activity
        self._stop_flag = stop_flag
        self.on_stuck: Callable[[float], str] = lambda stuck_s: f"stuck for {stuck_s:.0f} s"
        self._timeout_s = timeout_s + _GRACE_S
        self._launcher_pid = launcher_pid
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = (self._activity.phase, 0)
        idle_s = 0.0
        while not self._is_done.wait(_INTERVAL_S):
            if self._launcher_pid not in (None, os.getppid()):
                self._launcher_pid = None
                os.kill(os.getpid(), signal.SIGTERM)
            phase = self._activity.phase
            now = (phase, self._stop_flag.num_polls + self._activity.num_forwards)
            # Counted in intervals of this thread, not by a clock: none passes while the process is
            # suspended.
            idle_s = idle_s + _INTERVAL_S if now == seen and phase in _WATCHED else 0.0
            seen = now
            if idle_s > self._timeout_s:
                faulthandler.dump_traceback()
                line = self.on_stuck(idle_s)
                os.write(sys.stderr.fileno(), f"accel_trainer: {line}\n".encode())
                os._exit(ExitCode.INTERNAL)
