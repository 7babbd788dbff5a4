"""Stopping in good order: signals become a flag, and all processes agree on the step they stop at."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


TIME_LIMIT = 100  # above every signal number


@dataclass(frozen=True)
class Stop:
    """What made a run stop: nothing (code 0), a signal (its number) or the time limit."""

    code: int = 0

    def __bool__(self) -> bool:
        return self.code != 0

    @property
    def is_preemption(self) -> bool:
        """Whether a signal asked for it."""
        return 0 < self.code < TIME_LIMIT

    @property
    def reason(self) -> str | None:
        """The signal's name, `time limit`, or None."""
        if not self.code:
            return None
        return signal.Signals(self.code).name if self.is_preemption else "time limit"


class StopFlag:
    """A wish to stop, agreed by all processes.

    A process raises the flag at any time. `poll` is called once per step by every process and sets
    `agreed` once *any* of them had raised it. With several processes that is one step later: the
    reduction runs while the next step computes, so that no step waits for it.
    """

    def __init__(self, *, num_processes: int = 1) -> None:
        self.agreed = Stop()
        self._code, self._num_processes = 0, num_processes
        self._reduced = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    @property
    def is_raised(self) -> bool:
        """Whether this process has asked for a stop."""
        return self._code != 0

    def request(self, code: int) -> None:
        """Ask for a stop by signal number or `TIME_LIMIT`; the first is kept. Safe in a signal handler."""
        self._code = self._code or code

    def poll(self) -> bool:
        """Return whether to stop now, the same on every process. **Collective** (asynchronous)."""
        if self._num_processes == 1:
            self.agreed = Stop(self._code)
        else:
            if self._pending is not None:
                self._pending.wait()
                self.agreed = Stop(int(self._reduced))
            if not self.agreed:
                self._reduced.fill_(self._code)
                self._pending = dist.all_reduce(self._reduced, op=dist.ReduceOp.MAX, async_op=True)
        return bool(self.agreed)

    def drain(self) -> None:
        """Wait for a reduction in flight: a process must not leave while others reduce."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[None]:
    """Raise `flag` on the first TERM, INT, USR1 or HUP inside the block; a second INT leaves at once with 130.

    Outside the main thread, where Python allows no handlers, the block runs without them.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and flag.is_raised:
            os._exit(128 + signal.SIGINT)
        flag.request(number)

    try:
        previous = {number: signal.signal(number, handle) for number in SIGNALS}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_signals(worker_id: int) -> None:
    """Let a data worker outlive a signal to its process group: the main process decides when it ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
