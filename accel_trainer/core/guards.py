"""Guarded folders: once one was moved or replaced, the run refuses to write to it.

A run writes by path, and nothing tells it that another program has renamed its folder or put
another one in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import platform
from .errors import CheckpointError

# Writes to a folder are refused unless a path still leads to the same file.
_guards: list[tuple[Path, Path, os.stat_result]] = []


@contextmanager
def guarded(folder: Path, path: Path, descriptor: int) -> Iterator[None]:
    """Refuse writes to `folder` once `path` is no longer the open file `descriptor`.

    The open descriptor keeps the inode number from being reused. File systems without stable inode
    numbers are not guarded.
    """
    guard = (folder, path, os.fstat(descriptor))
    if not os.path.samestat(os.lstat(path), guard[2]):
        yield
        return
    _guards.append(guard)
    try:
        yield
    finally:
        _guards.remove(guard)


@contextmanager
def guarded_folder(folder: Path) -> Iterator[None]:
    """Refuse writes to `folder` after it was moved or replaced.

    Does nothing on Windows, which does not move a folder with open files. Raises OSError.
    """
    with ExitStack() as stack:
        if (descriptor := platform.open_directory(folder)) is not None:
            stack.callback(os.close, descriptor)
            stack.enter_context(guarded(folder, folder, descriptor))
        yield


def check_not_moved(path: Path) -> None:
    """Raise CheckpointError if `path` lies in a guarded folder that was moved or replaced."""
    for folder, place, expected in list(_guards):
        if not path.is_relative_to(folder):
            continue
        try:
            if os.path.samestat(os.lstat(place), expected):
                continue
            fact = f"the folder is gone, and there is a different {place} in its place"
        except (FileNotFoundError, NotADirectoryError):
            fact = f"the folder is gone: there is no {place}"
        fix = "put it back, or give its new path to --output-dir, and start again"
        raise CheckpointError("RUN_FOLDER", f"{fact}. Nothing is written there: {fix}")
