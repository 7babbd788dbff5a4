"""Signals in data workers, in processes that have finished, and from workers that die."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ..core.platform import STOP_SIGNALS

_CHILD_DIED = getattr(signal, "SIGCHLD", None)  # None: Windows


class WorkerDeaths:
    """Reports the death of a data worker only while this process waits for data.

    torch's handler of SIGCHLD raises anywhere: in a forward, a save, or a callback that takes the
    error for its own.
    """

    def __init__(self) -> None:
        self._raise_if_dead: Callable[[int, FrameType | None], object] = lambda number, frame: None
        self._is_waiting = False

    def defer(self) -> None:
        """Replace torch's handler, which is installed with the first workers.

        Does nothing outside the main thread.
        """
        handler = signal.getsignal(_CHILD_DIED) if _CHILD_DIED else None
        if (
            _CHILD_DIED
            and callable(handler)
            and getattr(handler, "__module__", "").startswith("torch.")
        ):
            with suppress(ValueError):  # outside the main thread
                signal.signal(
                    _CHILD_DIED, lambda *event: self._is_waiting and self._raise_if_dead(*event)
                )
                self._raise_if_dead = handler

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise torch's RuntimeError for a worker that has died, or dies inside the block."""
        self._is_waiting = True
        try:
            self._raise_if_dead(_CHILD_DIED or 0, None)
            yield
        finally:
            self._is_waiting = False


worker_deaths = WorkerDeaths()


def ignore_signals() -> None:
    """Let a process survive a signal to its group: a data worker, which main ends, or a process that has finished."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
