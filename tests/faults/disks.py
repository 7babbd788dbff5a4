"""Disks that misbehave: put one in the place of `filesystem.disk`."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from accel_trainer.core import filesystem
from accel_trainer.core.filesystem import TEMPORARY_NAME
from accel_trainer.lab.chaos.disk import InterceptedDisk

When = Literal["before", "half", "after"]
D = TypeVar("D", bound=filesystem.Disk)


@contextmanager
def installed(disk: D) -> Iterator[D]:
    """Let all changes go through `disk` inside the block."""
    original = filesystem.disk
    filesystem.disk = disk
    try:
        yield disk
    finally:
        filesystem.disk = original


def _nothing() -> None:
    pass


class DyingDisk(InterceptedDisk):
    """Kills its process in the middle of a change, after `num_changes` others."""

    def __init__(self, num_changes: int) -> None:
        self._num_left = num_changes

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            act_half()
            os.kill(os.getpid(), signal.SIGKILL)
        return act()


class CountingDisk(InterceptedDisk):
    """Records the operations in `operations`."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        self.operations.append(operation)
        return act()


class KillingDisk(InterceptedDisk):
    """Kills the process before, half-way through or after the change number `at`."""

    def __init__(self, at: int, when: When) -> None:
        self._left = at
        self._when = when

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            {"before": _nothing, "half": act_half, "after": act}[self._when]()
            os.kill(os.getpid(), signal.SIGKILL)
        return act()


class FailingDisk(InterceptedDisk):
    """Fails with `error` from the change number `at` on, `times` times; a write fails half-way."""

    def __init__(self, at: int, error: int, *, times: int) -> None:
        self._change = -1
        self._failing = range(at, at + times)
        self._error = error

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        self._change += 1
        if self._change in self._failing:
            act_half()
            raise OSError(self._error, os.strerror(self._error), str(path))
        return act()


class NamingDisk(InterceptedDisk):
    """Calls `meet` with each change: its kind, its path in `folder`, and the how manieth it is.

    The thread that saves and the one that trains take turns differently in each run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def intercept(self, operation: str, path: Path, act: Any, act_half: Any, *details: Any) -> Any:
        parts = os.path.relpath(path, self._folder).split("/")
        key = (operation, "/".join(map(_without_owner, parts)))
        with self._lock:
            self._counts[key] += 1
            named = (*key, self._counts[key])
        return self.meet(named, act, act_half)

    def meet(self, change: tuple[str, str, int], act: Any, act_half: Any) -> Any:
        return act()


def _without_owner(part: str) -> str:
    """A temporary's name without the process and the time that make it unique."""
    return re.sub(r"-\d+-\d+$", "", part) if TEMPORARY_NAME.fullmatch(part) else part


def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    return (
        subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    )


def mount_small_disk(path: Path, options: str = "size=1m") -> None:
    """Give this process, which must have one thread, a tmpfs of its own at `path`.

    It ends with the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    new_user = 0x10000000
    new_mounts = 0x20000
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_user | new_mounts) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def fill(path: Path) -> None:
    """Write a file until there is no space left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
