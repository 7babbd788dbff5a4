"""What POSIX has and Windows has otherwise or not at all, in one place: nobody else asks which system this is."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# For every `os.open`: follow no link, hand nothing to other programs, change no byte.
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)

_LOCKED_BYTE = 2**30  # of Windows' locks, which keep others from reading what they cover


def sync_directory(path: Path) -> None:
    """Return once the names in a directory survive a power loss; Windows opens no directory, and has no such call."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_lock(descriptor: int) -> None:
    """Lock an open file until it is closed or this process ends, however it ends. Raises OSError: it is locked.

    A POSIX record lock: no child process holds it on. It is lost when this process closes any descriptor of the file.
    """
    if fcntl is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _lock_on_windows(descriptor, waits=False)


def is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock of an open file; asks without taking it, but on Windows."""
    if fcntl is None:
        try:
            _lock_on_windows(descriptor, waits=False)
        except OSError:
            return True
        return False
    # `struct flock` of fcntl.h begins with the type on Linux, and has it fourth elsewhere.
    layout, place = ("hhlli4x", 0) if sys.platform.startswith("linux") else ("llihh", 3)
    question = struct.pack(layout, *(fcntl.F_WRLCK if number == place else 0 for number in range(5)))
    answer = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return bool(answer[place] != fcntl.F_UNLCK)


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file until it is closed, once nobody else has it. Raises OSError: files cannot be locked there."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    else:
        _lock_on_windows(descriptor, waits=True)


def _lock_on_windows(descriptor: int, *, waits: bool) -> None:
    import msvcrt

    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
