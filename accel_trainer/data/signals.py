"""Signals to data workers and to finished processes, and the signal of a worker that died."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..core.platform import RUN_SIGNALS

_CHILD_DIED: Any = getattr(signal, "SIGCHLD", None)  # None on Windows


class WorkerDeaths:
    """Reports the death of a data worker only while this process waits for data.

    torch's handler of SIGCHLD raises wherever the process is: in a forward, in a save, or in a
    callback, which then seems to have failed.
    """

    def __init__(self) -> None:
        self._raise_if_dead: Callable[..., object] = lambda *event: None
        self._is_waiting = False

    def defer(self) -> None:
        """Replace torch's handler, which is installed with the first workers.

        Does nothing outside the main thread.
        """
        handler: Any = signal.getsignal(_CHILD_DIED) if _CHILD_DIED else None
        if str(getattr(handler, "__module__", None)).startswith("torch."):
            with suppress(ValueError):  # Outside the main thread.
                signal.signal(
                    _CHILD_DIED, lambda *event: self._is_waiting and self._raise_if_dead(*event)
                )
                self._raise_if_dead = handler

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise torch's RuntimeError for a worker that has died, or dies inside the block."""
        self._is_waiting = True
        try:
            self._raise_if_dead(_CHILD_DIED, None)
            yield
        finally:
            self._is_waiting = False


worker_deaths = WorkerDeaths()


def ignore_signals() -> None:
    """Ignore signals to the process group that ask a run to stop or to save.

    For data workers, which the main process ends, and for processes that have finished.
    """
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
