"""A thread that notices when training is stuck or the launcher has died."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from ..core.errors import ExitCode
from .activity import Activity
from .preemption import StopFlag

_INTERVAL_S = 0.5
# The timeout of collectives limits how long a process waits for others. A little later, the
# processes that waited have ended with that error. A process that still makes no progress is the
# one that they waited for.
_GRACE_S = 3.0
# In other phases (start, end, waiting for the disk) a process may take as long as it needs.
_WATCHED = ("training", "evaluation", "save")


@dataclass(eq=False)
class Watchdog:
    """Ends a process without progress for `timeout_s`; stops it cleanly if its launcher dies.

    Progress is a forward, or a poll of the stop flag: there is one for each step and each evaluated
    batch. `on_stuck` gets the seconds without progress. A stuck process prints the stacks of its
    threads, then the line that `on_stuck` returns. `show_life` is called twice a second while a
    process may take as long as it needs.
    """

    activity: Activity
    stop_flag: StopFlag
    _: KW_ONLY
    timeout_s: float
    launcher_pid: int | None
    show_life: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.on_stuck: Callable[[float], str] = lambda stuck_s: f"stuck for {stuck_s:.0f} s"
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = (self.activity.phase, 0)
        idle_s = 0.0
        while not self._is_done.wait(_INTERVAL_S):
            if self.launcher_pid not in (None, os.getppid()):
                self.launcher_pid = None
                os.kill(os.getpid(), signal.SIGTERM)
            phase = self.activity.phase
            if phase not in _WATCHED:
                with suppress(RuntimeError, ValueError):  # the others are gone
                    self.show_life()
            now = (phase, self.stop_flag.num_polls + self.activity.num_forwards)
            # Intervals of this thread are counted, and no clock is read: while the process is
            # suspended, no interval passes.
            idle_s = idle_s + _INTERVAL_S if now == seen and phase in _WATCHED else 0.0
            seen = now
            if idle_s > self.timeout_s + _GRACE_S:
                try:
                    # Not to `sys.stderr`, which may have been replaced by an object without a file.
                    faulthandler.dump_traceback(2)
                    os.write(2, f"accel_trainer: {self.on_stuck(idle_s)}\n".encode())
                finally:
                    os._exit(ExitCode.INTERNAL)
