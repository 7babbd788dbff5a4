"""The folder of a run: whether it can be written, its free space, and its exclusive lock."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from . import filesystem, platform
from .errors import ConfigError, OutputError
from .filesystem import writes_to
from .logger import logger

# The files and folders that a run writes into its folder.
_FILES = (
    "attempts.jsonl",
    "config.yaml",
    "environment.json",
    "recipe.py",
    "evaluation.safetensors",
    "metrics.jsonl",
    "mistakes.json",
    "result.json",
    "run.lock",
    "status.json",
)
_FOLDERS = ("checkpoints", "export", "logs", "pictures", "profile", "trackers")
_REPLACED = (
    "checkpoints/best.json",
    "export/config.json",
    "export/model.*",
    "export/pretrained/*",
    "logs/rank-*",
    "trackers/*",
)
_CHECKPOINTS = f"*step-{'[0-9]' * 10}-epoch-{'[0-9]' * 5}"  # also those that were quarantined


def prepare_directory(path: Path) -> Path:
    """Create `path` with its parents, check that it can be written, and return it resolved.

    Raises OutputError for an impossible name, a file in the way, or a missing permission.
    """
    if re.search(r"[\x00-\x1f\x7f]", str(path)):
        raise OutputError(
            "OUT_DIR_NAME",
            f"the output folder {str(path)!r} contains a control character: rename it",
        )
    with writes_to(path):
        path = Path(os.path.realpath(path))  # which no loop of links ends
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                filesystem.make_directory(folder)
        with filesystem.probe_file(path):
            pass
    return path


def expand_home(path: Path) -> Path:
    """Return `path` with its `~` replaced. Raises ConfigError if the home folder is unknown."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            "HOME",
            f"{path} needs a home folder, which is unknown: set HOME, or give an absolute path "
            "(for the cache: --cache-dir)",
        ) from None


def free_bytes(path: Path) -> int:
    """Return how many bytes this user can still write to the file system of `path`."""
    return shutil.disk_usage(path).free


def refuse_strange_entries(folder: Path) -> None:
    """Raise OutputError if a run would overwrite an entry of `folder` that no run has written.

    Such an entry is a symlink, a pipe or the like with the name of a run's file or folder. In a
    folder without a run's lock or checkpoint, any file that a run would replace is one.
    """
    fix = "move it away, or choose a different folder"
    for path in folder.iterdir():
        if path.name in _FILES and not stat.S_ISREG(path.lstat().st_mode):
            raise OutputError("OUT_DIR_ENTRY", f"{path} is not a file: {fix}")
        if path.name in _FOLDERS and not stat.S_ISDIR(path.lstat().st_mode):
            raise OutputError("OUT_DIR_ENTRY", f"{path} is not a folder: {fix}")
    if holds_run(folder):
        return
    for path in chain.from_iterable(map(folder.glob, (*_FILES, *_REPLACED))):
        raise OutputError(
            "OUT_DIR_ENTRY",
            f"{path} would be overwritten, "
            f"and the folder has no run.lock or checkpoint of a run: {fix}",
        )


def holds_run(folder: Path) -> bool:
    """Return whether a run has begun in `folder`: it has left its lock file or a checkpoint."""
    return (folder / "run.lock").exists() or any((folder / "checkpoints").glob(_CHECKPOINTS))


def remove_new_folder(folder: Path) -> None:
    """Remove what a run's start has written to a new folder, and the folder if it is then empty.

    Raises OSError.
    """
    names = (*_FILES, "export/config.json")
    for path in (*map(folder.joinpath, names), *(folder / "logs").glob("rank-*.json")):
        if path.is_file():
            filesystem.disk.remove(path)
    for path in (*map(folder.joinpath, _FOLDERS), folder):
        if path.is_dir() and not any(path.iterdir()):
            filesystem.disk.remove_empty(path)


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock by the file `path`, without taking it.

    If that cannot be found out, it counts as locked. Do not call this in the process that holds the
    lock: it would lose it.
    """
    try:
        with filesystem.open_file(path) as file:
            return platform.is_locked(file.fileno())
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


@contextmanager
def run_lock(path: Path, *, is_optional: bool = False, owner: str = "") -> Iterator[int]:
    """Lock a run's folder by the file `path`, until the end of the block or of the process.

    The kernel frees the lock when the process dies, and a forked data worker does not inherit it:
    there is no age, timeout or takeover. The file holds the `owner`, by default a text that tells
    people who has the lock. Yields the descriptor of the file, the only one: closing any would free
    the lock.

    Raises OutputError if another run has the lock, or if the file system has no locks; if the lock
    `is_optional`, the latter is a warning.
    """
    with writes_to(path.parent):
        descriptor = filesystem.open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            platform.take_lock(descriptor)
        except OSError as error:
            os.lseek(descriptor, 0, os.SEEK_SET)
            found = _not_locked(path.parent, error, os.read(descriptor, 4096))
            if found.code != "NO_LOCKS" or not is_optional:
                raise found from error
            logger.warning(
                "[NO_LOCKS] %s is not locked: make sure that no other run writes there", path.parent
            )
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = owner or f"pid {os.getpid()} on {socket.gethostname()} since {since}"
        with writes_to(path.parent):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, owner.encode())
        yield descriptor
    finally:
        os.close(descriptor)


def _not_locked(folder: Path, error: OSError, owner: bytes) -> OutputError:
    if error.errno not in (errno.EACCES, errno.EAGAIN):
        return OutputError(
            "NO_LOCKS",
            f"{folder} cannot be locked ({error.strerror}): choose a different --output-dir, "
            "or add --run.no-lock if no other run writes there",
        )
    who = owner.decode(errors="replace")[:200] or "another process"
    return OutputError(
        "LOCKED",
        f"{folder} is locked by {who}: wait for that run or choose a different --output-dir",
    )
