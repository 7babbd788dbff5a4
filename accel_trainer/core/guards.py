"""Folders that are in use: nothing in one is changed once another folder has taken its path.

A program that renames a folder, or puts another in its place, does not tell the run that writes
there by its path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import platform
from .errors import CheckpointError


@dataclass(frozen=True)
class _Guard:
    """What must be at `path` for anything in `folder` to be changed."""

    folder: Path
    path: Path
    expected: os.stat_result

    def check(self) -> None:
        try:
            if os.path.samestat(os.lstat(self.path), self.expected):
                return
            fact = f"the folder is gone, and another {self.path} is in its place"
        except (FileNotFoundError, NotADirectoryError):
            fact = f"the folder is gone: there is no {self.path}"
        fix = "put it back, or give its new path to --output-dir, and start again"
        raise CheckpointError("RUN_FOLDER", f"{fact}. Nothing is written there: {fix}")


_guards: list[_Guard] = []


@contextmanager
def guarded(folder: Path, path: Path, descriptor: int) -> Iterator[None]:
    """Let any change in `folder` raise CheckpointError once another file than `descriptor` is at `path`.

    The open descriptor keeps the inode number from being given to another file. A file system that
    has no lasting identities is not guarded.
    """
    guard = _Guard(folder, path, os.fstat(descriptor))
    if not os.path.samestat(os.lstat(path), guard.expected):
        yield
        return
    _guards.append(guard)
    try:
        yield
    finally:
        _guards.remove(guard)


@contextmanager
def kept_in_place(folder: Path) -> Iterator[None]:
    """Let any change in `folder` raise CheckpointError once another folder is at its path.

    Without effect on Windows, which does not move a folder with open files. Raises OSError.
    """
    with ExitStack() as stack:
        if (descriptor := platform.open_directory(folder)) is not None:
            stack.callback(os.close, descriptor)
            stack.enter_context(guarded(folder, folder, descriptor))
        yield


def check_place(path: Path) -> None:
    """Raise CheckpointError if `path` lies in a folder that is guarded and is no longer where it was."""
    for guard in list(_guards):
        if path.is_relative_to(guard.folder):
            guard.check()
