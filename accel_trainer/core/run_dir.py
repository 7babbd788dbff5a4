"""The folder of a run: whether it can be written, its free space, and the lock that only one run can hold."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from . import filesystem, platform
from .errors import ConfigError, OutputError
from .guards import guarded

# What a run writes into its folder.
_FILES = (
    "attempts.jsonl",
    "config.yaml",
    "environment.json",
    "evaluation.safetensors",
    "metrics.jsonl",
    "mistakes.json",
    "result.json",
    "run.lock",
    "status.json",
)
_FOLDERS = ("checkpoints", "export", "logs", "profile", "trackers")


def prepare_directory(path: Path) -> Path:
    """Create `path` with its parents, check that it can be written, and return it resolved.

    Raises OutputError: an impossible name, a file in the way, or no permission.
    """
    if re.search(r"[\x00-\x1f\x7f]", str(path)):
        raise OutputError(
            "OUT_DIR_NAME",
            f"the output folder {str(path)!r} contains a control character: rename it",
        )
    with writes_to(path):
        path = path.resolve()
        for missing in reversed(
            [folder for folder in (path, *path.parents) if not folder.exists()]
        ):
            filesystem.make_directory(missing)
        with filesystem.probe_file(path):
            pass
    return path


def expand_home(path: Path) -> Path:
    """Return `path` with its `~` replaced. Raises ConfigError if the home folder is unknown."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            "HOME", f"the home folder in {path} is unknown: set HOME, or give an absolute path"
        ) from None


@contextmanager
def writes_to(folder: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as of a full disk, as an OutputError that names `folder`."""
    try:
        yield
    except OSError as error:
        fact = f"cannot write to {str(folder)[:200]} ({error.strerror})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError("NO_SPACE", f"{fact}: free some space and start again") from error
        raise OutputError("OUT_DIR_NOT_WRITABLE", f"{fact}: choose another --output-dir") from error


def free_bytes(path: Path) -> int:
    """Return how much this user can still write to the file system of `path`."""
    return shutil.disk_usage(path).free


def refuse_strange_entries(folder: Path) -> None:
    """Raise OutputError for something in `folder` that a run would overwrite, and that no run has written.

    That is a link, a pipe or the like with the name of a run's file or folder; and any of these
    files where there is neither the lock nor a checkpoint of a run.
    """
    for names, kind, is_one in ((_FILES, "file", stat.S_ISREG), (_FOLDERS, "folder", stat.S_ISDIR)):
        for path in filter(os.path.lexists, (folder / name for name in names)):
            if not is_one(path.lstat().st_mode):
                raise OutputError(
                    "OUT_DIR_ENTRY",
                    f"{path} is not a {kind}: move it away, or choose another folder",
                )
    if (folder / "run.lock").exists() or any((folder / "checkpoints").glob("*step-*")):
        return
    overwritten = [
        folder / name for name in (*_FILES, "export/config.json", "export/model.safetensors")
    ]
    if found := next((path for path in overwritten if path.exists()), None):
        fact = (
            f"{found} would be overwritten, and the folder has no run.lock or checkpoint of a run"
        )
        raise OutputError("OUT_DIR_ENTRY", f"{fact}: move it away, or choose another folder")


def remove_new_folder(folder: Path) -> None:
    """Remove what a start has written to a new folder, and the folder if nothing else is in it.

    Raises OSError.
    """
    written = [folder / name for name in (*_FILES, "export/config.json")]
    for path in (*written, *(folder / "logs").glob("rank-*.json")):
        if path.is_file():
            filesystem.disk.remove(path)
    for path in (*(folder / name for name in _FOLDERS), folder):
        if path.is_dir() and not any(path.iterdir()):
            filesystem.disk.remove_empty(path)


def is_in_use(folder: Path) -> bool:
    """Whether another process has the lock of a run's folder; takes no lock.

    Unknown counts as in use.

    Not for the process that has the lock: it would lose it.
    """
    try:
        with filesystem.open_file(folder / "run.lock") as file:
            return platform.is_locked(file.fileno())
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


class RunLock:
    """An exclusive lock on a run's folder, held until the end of the block or of the process.

    The kernel frees it when the process dies, and a forked data worker does not keep it: it needs
    no age, timeout or takeover. The content of the file only tells people who holds it.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises OutputError if another run has it, or if the file system has no locks.
        """
        self._path = path
        # The lock is lost when the process closes any descriptor of the file: there is only this
        # one.
        with writes_to(path.parent):
            self._descriptor = filesystem.open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            platform.take_lock(self._descriptor)
        except OSError as error:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            owner = os.read(self._descriptor, 4096)
            os.close(self._descriptor)
            raise _not_locked(path.parent, error, owner) from error
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode()
        with writes_to(path.parent):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, owner)

    def guarded_folder(self) -> AbstractContextManager[None]:
        """Refuse writes to the run's folder once the lock file was moved or replaced."""
        return guarded(self._path.parent, self._path, self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *unused: object) -> None:
        os.close(self._descriptor)


def _not_locked(folder: Path, error: OSError, owner: bytes) -> OutputError:
    if error.errno not in (errno.EACCES, errno.EAGAIN):
        return OutputError(
            "NO_LOCKS", f"{folder} cannot be locked ({error.strerror}): choose another --output-dir"
        )
    who = owner.decode(errors="replace")[:200] or "another process"
    return OutputError(
        "LOCKED", f"{folder} is locked by {who}: wait for that run or choose another --output-dir"
    )
