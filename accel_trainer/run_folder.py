"""The folder of a run: that it can be written, has space, and that one run at a time writes it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import portable, storage
from .errors import ConfigError, OutputError

_MAX_NAME_BYTES = 255
# What a run writes into its folder.
_FILES = (
    "attempts.jsonl", "config.yaml", "environment.json", "metrics.jsonl", "result.json", "run.lock", "status.json",
)  # fmt: skip
_FOLDERS = ("checkpoints", "export", "logs", "profile", "trackers")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def prepare_directory(path: Path) -> Path:
    """Create `path` with its parents, prove that it can be written, and return it resolved.

    Raises OutputError: a name that cannot be, a file in the way, or no permission.
    """
    for part in path.parts:
        if re.search(r"[\x00-\x1f\x7f]", part):
            raise OutputError("OUT_DIR_NAME", f"the output folder {str(path)!r} has a control character: rename it")
        if len(os.fsencode(part)) > _MAX_NAME_BYTES:
            raise OutputError(
                "PATH_TOO_LONG",
                f"the output folder's part {part[:20]!r}... has {len(os.fsencode(part))} bytes, "
                f"more than {_MAX_NAME_BYTES}: choose a shorter name",
            )
    with writes_to(path):
        path = path.resolve()
        for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            storage.make_directory(missing)
        storage.check_writable(path)
    return path


def expand_home(path: Path) -> Path:
    """Return `path` with its `~` replaced. Raises ConfigError where nobody knows the home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError("HOME", f"the home folder in {path} is unknown: set HOME, or give a whole path") from None


@contextmanager
def writes_to(folder: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as of a full disk, as an OutputError that names `folder`."""
    try:
        yield
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(path: Path, error: OSError) -> OutputError:
    if error.errno == errno.ENAMETOOLONG:
        return OutputError("PATH_TOO_LONG", f"the output folder {str(path)[:40]}... is too long: choose a shorter one")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return OutputError("OUT_DIR_IS_FILE", f"{path} is or lies below a file: choose a folder for --output-dir")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError("NO_SPACE", f"{path} cannot be written ({error.strerror}): free some space and start again")
    return OutputError(
        "OUT_DIR_NOT_WRITABLE",
        f"cannot write to the output folder {path} ({error.strerror}): choose another --output-dir",
    )


def free_bytes(path: Path) -> int:
    """Return how much this user can still write to the file system of `path`."""
    return shutil.disk_usage(path).free


def foreign_access(path: Path) -> str | None:
    """Return why somebody else may have changed `path`, or None if only this user can."""
    status = path.stat()
    if not hasattr(os, "geteuid"):  # Windows, where rights are not in the mode
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def refuse_strange_entries(folder: Path) -> None:
    """Raise OutputError if a link, a pipe or the like stands in a run's folder where a run has a file or a folder."""
    for names, is_sound in ((_FILES, stat.S_ISREG), (_FOLDERS, stat.S_ISDIR)):
        for path in filter(os.path.lexists, (folder / name for name in names)):
            if not is_sound(path.lstat().st_mode):
                kind = "file" if is_sound is stat.S_ISREG else "folder"
                raise OutputError(
                    "OUT_DIR_ENTRY",
                    f"{path} is not a {kind}, but a link or something else: move it away, or choose another "
                    "--output-dir",
                )


def is_in_use(folder: Path) -> bool:
    """Whether another process has the lock of a run's folder; asks without taking it. Unknown counts as in use.

    Not for a process that has the lock itself: it would lose it.
    """
    try:
        with storage.open_file(folder / "run.lock") as file:
            return portable.is_locked(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def refuse_in_use(folder: Path) -> None:
    """Raise OutputError if another process has the lock of a run's folder."""
    if is_in_use(folder):
        raise _not_locked(folder, OSError(errno.EAGAIN, ""), storage.read_file(folder / "run.lock", max_bytes=4096))


class RunLock:
    """An exclusive lock on a run's folder, held until `release` or the end of the process.

    A POSIX record lock: the kernel frees it when the process dies, however it dies, and a forked
    data worker that outlives it does not hold it. So there is no age, timeout or takeover. The file's
    content tells people who holds it; nothing is decided from it.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises OutputError if another run has it, or if the file system has no locks."""
        # The kernel drops the lock when the process closes any descriptor of the file, so it is
        # opened once, here, and read and written through this descriptor only.
        with writes_to(path.parent):
            self._descriptor = storage.open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            portable.take_lock(self._descriptor)
        except OSError as error:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            owner = os.read(self._descriptor, 4096)
            os.close(self._descriptor)
            raise _not_locked(path.parent, error, owner) from error
        owner = json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "boot_id": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None,
                "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        ).encode()
        with writes_to(path.parent):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, owner)

    def release(self) -> None:
        """Let another run have the folder."""
        os.close(self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()


def _not_locked(folder: Path, error: OSError, owner: bytes) -> OutputError:
    if error.errno in (errno.EACCES, errno.EAGAIN):
        reason = f"{folder} is locked by {_describe(owner)}"
        return OutputError("LOCKED", f"{reason}: wait for that run or choose another --output-dir")
    reason = f"the file system of {folder} has no locks ({error.strerror})"
    return OutputError("NO_LOCKS", f"{reason}: choose another, or switch the lock off if nothing else writes there")


def _describe(owner: bytes) -> str:
    """Return who holds a lock, for people."""
    try:
        fields = json.loads(owner)
        return f"pid {fields['pid']} on {fields['host']} since {fields['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
