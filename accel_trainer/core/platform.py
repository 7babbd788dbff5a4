"""The differences between POSIX and Windows: signals, locks, and the durability of names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # Windows

# For every `os.open`: follow no symlink, close in child programs, translate no newline.
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)

_SIGNAL_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGBREAK")
STOP_SIGNALS = tuple(signal.Signals[name] for name in _SIGNAL_NAMES if hasattr(signal, name))
"""The signals that ask a run to stop. Windows has SIGTERM, SIGINT and SIGBREAK (Ctrl-Break)."""
SAVE_SIGNALS = (signal.SIGUSR2,) if hasattr(signal, "SIGUSR2") else ()
"""The signal that asks a run to save and go on; Windows has none."""
RUN_SIGNALS = (*STOP_SIGNALS, *SAVE_SIGNALS)

# On Windows, no other process can read the locked byte, so it lies beyond the content.
_LOCKED_BYTE = 2**30


@contextmanager
def signals_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` for each of `RUN_SIGNALS` that comes in the block.

    A signal that was ignored stays ignored, as under nohup. Outside the main thread, where Python
    allows no handlers, the block runs without them.
    """
    handled = [number for number in RUN_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        previous = {number: signal.signal(number, handle) for number in handled}
    except ValueError:
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def open_directory(path: Path) -> int | None:
    """Open a directory and return its descriptor; None on Windows, which has no such call."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory survive a power loss.

    Does nothing on Windows, which has no such call.
    """
    if (descriptor := open_directory(path)) is None:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_lock(descriptor: int) -> None:
    """Lock an open file until it is closed or this process ends. Raises OSError if it is locked.

    On POSIX, this is a record lock: child processes do not inherit it, and it is lost when this
    process closes any descriptor of the file.
    """
    if fcntl is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _lock_on_windows(descriptor, waits=False)


def is_locked(descriptor: int) -> bool:
    """Return whether another process has locked an open file, or its file system has no locks.

    On Windows, this takes the lock if it is free.
    """
    try:
        if fcntl is not None:
            os.lockf(descriptor, os.F_TEST, 0)
        else:
            _lock_on_windows(descriptor, waits=False)
    except OSError:
        return True
    return False


def wait_for_lock(descriptor: int) -> None:
    """Wait until no other process has locked an open file, and lock it until it is closed.

    Raises OSError if the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    else:
        _lock_on_windows(descriptor, waits=True)


def _lock_on_windows(descriptor: int, *, waits: bool) -> None:
    import msvcrt

    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # Windows
