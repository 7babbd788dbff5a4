"""Stopping in good order: signals become a flag, and all processes agree on the step they stop at."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import Preempted
from .process_group import find_cpu_group

# Those of them that this system has: Windows has the first two, and Ctrl-Break.
_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGBREAK")
SIGNALS = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))

_CHILD_DIED = getattr(signal, "SIGCHLD", None)  # None: Windows

TIME_LIMIT = 100  # above every signal number
_NOTHING = 1000  # as it travels: the smallest code wins, and a signal is smaller than the time limit

T = TypeVar("T")


class Stop(int):
    """What made a run stop: nothing (0), a signal (its number) or the time limit."""

    @property
    def is_preemption(self) -> bool:
        """Whether a signal asked for it."""
        return 0 < self < TIME_LIMIT

    @property
    def reason(self) -> str | None:
        """The signal's name, `time limit`, or None."""
        if not self:
            return None
        return signal.Signals(self).name if self.is_preemption else "time limit"


class StopFlag:
    """A wish to stop, agreed by all processes.

    A process raises the flag at any time. `poll` is called once per step by every process and sets
    `agreed` once *any* of them had raised it. With several processes that is one step later: the
    reduction runs while the next step computes, so that no step waits for it.

    `num_polls` counts: whoever watches from another thread sees by it that the process moves. While
    `may_leave` is set, there is nothing to save, and a signal raises `Preempted` where it arrives.
    """

    def __init__(self, *, num_processes: int = 1, timeout_s: float = 1800.0) -> None:
        """With several processes **Collective**; `timeout_s` is how long a poll waits for the others."""
        self.agreed = self._wish = Stop()
        self.num_polls = 0
        self.may_leave = False
        self._num_processes = num_processes
        self._group = None if num_processes == 1 else find_cpu_group(timeout_s=timeout_s)
        self._reduced = torch.zeros(2, dtype=torch.int32)  # smallest wish; whether all have run out
        self._pending: dist.Work | None = None
        self._have_all_run_out = False

    @property
    def is_raised(self) -> bool:
        """Whether this process has asked for a stop."""
        return bool(self._wish)

    def request(self, code: int) -> None:
        """Ask for a stop by signal number or `TIME_LIMIT`; the first signal is kept. Safe in a signal handler."""
        if not self._wish.is_preemption:
            self._wish = Stop(code)

    def poll(self, *, has_run_out: bool = False) -> bool:
        """Return whether to stop now, the same on every process. **Collective** (asynchronous)."""
        self.num_polls += 1
        if self._num_processes == 1:
            self.agreed, self._have_all_run_out = self._wish, has_run_out
        else:
            self.drain()
            if not (self.agreed.is_preemption or self._have_all_run_out):
                self._reduced[0], self._reduced[1] = self._wish or _NOTHING, has_run_out
                self._pending = dist.all_reduce(self._reduced, dist.ReduceOp.MIN, self._group, async_op=True)
        return bool(self.agreed)

    def drain(self) -> None:
        """Wait for a reduction in flight: a process must not leave while others reduce. **Collective.**"""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.agreed = Stop(int(self._reduced[0]) % _NOTHING)
            self._have_all_run_out = bool(self._reduced[1])

    def agree(self) -> bool:
        """Return whether any process wants to stop, as of now. **Collective.**"""
        self.poll()
        self.drain()
        return bool(self.agreed)

    def until_preempted(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items` until they end, or a signal is agreed. **Collective**: all leave after the same round.

        Processes may have different numbers of items: one that has run out keeps answering the
        others, until all have.
        """
        for item in items:
            self.poll()
            if self.agreed.is_preemption:
                return
            yield item
        while not (self._have_all_run_out or self.agreed.is_preemption):
            self.poll(has_run_out=True)
        self._have_all_run_out = False


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[None]:
    """Raise `flag` on the first TERM, INT, USR1 or HUP inside the block; a second INT leaves at once with 130.

    A signal that was ignored stays ignored, as under nohup. Outside the main thread, where Python
    allows no handlers, the block runs without them.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and flag.is_raised:
            os._exit(128 + signal.SIGINT)
        flag.request(number)
        if flag.may_leave:
            flag.may_leave = False  # once: a second signal must not interrupt the way out
            fact = f"{signal.Signals(number).name} before training began, nothing is lost"
            raise Preempted("PREEMPTED", f"{fact}: run the same command again")

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        previous = {number: signal.signal(number, handle) for number in heard}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class WorkerDeaths:
    """When this process is told that a data worker died: while it waits for data, and nowhere else.

    Torch's handler of SIGCHLD raises wherever the process then is, which may be a forward, a save, or a
    callback that takes the error for its own.
    """

    def __init__(self) -> None:
        self._tell: Callable[[int, FrameType | None], object] = lambda number, frame: None
        self._is_heard = False

    def defer(self) -> None:
        """Take over torch's handler, which comes with the first workers. Without effect outside the main thread."""
        if _CHILD_DIED is None:
            return
        handler = signal.getsignal(_CHILD_DIED)
        if getattr(handler, "__module__", "").startswith("torch.") and callable(handler):
            with suppress(ValueError):
                signal.signal(_CHILD_DIED, self._handle)
                self._tell = handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_heard:
            self._tell(number, frame)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Raise torch's RuntimeError of a worker that has died, or dies inside the block."""
        self._is_heard = True
        try:
            self._tell(_CHILD_DIED or 0, None)
            yield
        finally:
            self._is_heard = False


worker_deaths = WorkerDeaths()


def ignore_signals() -> None:
    """Let a process outlive a signal to its group: a data worker, which main ends, or one that is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
