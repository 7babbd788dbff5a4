"""A disk that stops a process in the middle of a change, or that is full."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_trainer.commands import filesystem

from .faults import Fault

_BY_DESCRIPTOR = ("truncate", "sync")
_NEEDS_ROOM = ("make_directory", "create", "write", "link")

Act = Callable[[], Any]
"""Does a change of a disk, or the first half of it."""


def _whole(operation: str) -> Any:
    """Return the method for an operation that cannot be left half done."""
    change = getattr(filesystem.Disk, operation)

    def method(self: InterceptedDisk, path: Path, *given: Any) -> Any:
        details = given[1:] if operation in _BY_DESCRIPTOR else given
        return self.intercept(
            operation, path, lambda: change(self, path, *given), lambda: None, *details
        )

    return method


class InterceptedDisk(filesystem.Disk):
    """Passes each change to `intercept` with two callables: the change, and its first half."""

    make_directory = _whole("make_directory")
    create = _whole("create")
    truncate = _whole("truncate")
    sync = _whole("sync")
    sync_directory = _whole("sync_directory")
    rename = _whole("rename")
    link = _whole("link")
    remove = _whole("remove")

    def intercept(self, operation: str, path: Path, act: Act, act_half: Act, *details: Any) -> Any:
        """Do the change by `act()`, or leave it half done by `act_half()`."""
        return act()

    def write(self, path: Path, descriptor: int, data: filesystem.Chunk) -> None:
        """Append `data`; half of it is its first half."""

        def write(part: filesystem.Chunk) -> None:
            filesystem.Disk.write(self, path, descriptor, part)

        half = data[: len(data) // 2]
        self.intercept("write", path, lambda: write(data), lambda: write(half), bytes(data))

    def remove_tree(self, path: Path) -> None:
        """Delete a directory; half of that deletes the first half of its names."""

        def remove_half() -> None:
            names = sorted(os.listdir(path))
            for name in names[: (len(names) + 1) // 2]:
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()

        self.intercept(
            "remove_tree", path, lambda: filesystem.Disk.remove_tree(self, path), remove_half
        )


class FaultyDisk(InterceptedDisk):
    """Carries out each change in `folder` until `fault` strikes.

    `num_left`: after this many changes, SIGKILL ends the process in the middle of the next one.
    None: never. `is_full`: there is no space for anything new.
    """

    def __init__(self, folder: Path, kind: str, step: int, value: float) -> None:
        self.fault = Fault(kind, step, value)
        self.num_left = int(value) if (kind, step) == ("write", 0) else None
        self.is_full = False
        self._folder = folder

    def intercept(self, operation: str, path: Path, act: Act, act_half: Act, *details: Any) -> Any:
        """Do the change, or the fault that is due."""
        if not path.is_relative_to(self._folder):
            return act()
        if self.is_full and operation in _NEEDS_ROOM:
            act_half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                act_half()
                os.kill(os.getpid(), signal.SIGKILL)
        return act()


FAULTY_DISK = f"{__name__}:{FaultyDisk.__name__}"
"""The name of this class, as `Start.disk` takes it."""
