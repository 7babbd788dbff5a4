"""Temporary folders of commands; what a killed command left is removed by the next one."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...core import filesystem
from ...core.run_dir import holds_run, is_locked, run_lock

_MARK = ".accel-trainer-scratch"
"""The name of a file that holds the name of its folder: only such a folder is ever removed."""
_NAME = re.compile(r"\.?accel-trainer-[a-z]+-(?P<process_id>\d+)-[a-z0-9_]{8}")


@contextmanager
def scratch_folder(name: str, *, beside: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder, which is removed at the end of the block.

    `beside`: make it there, hidden, so that what is in it can be renamed to that path.

    It is locked as long as this process lives, so that another command can tell that it is in use,
    and its name has the process id: testing a lock that this process holds would free it.
    """
    prefix = f"{'.' if beside else ''}accel-trainer-{name}-{os.getpid()}-"
    place = beside and beside.parent
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as path:
        folder = Path(path).resolve()
        for other in filter(_is_abandoned, folder.parent.glob("*accel-trainer-*")):
            with suppress(OSError):
                filesystem.disk.remove_tree(other)
        with run_lock(folder / _MARK, owner=folder.name):
            yield folder


def _is_abandoned(folder: Path) -> bool:
    """Whether a folder is a scratch folder of this user, and of a process that has ended."""
    named = _NAME.fullmatch(folder.name)
    if named is None or named["process_id"] == str(os.getpid()):
        return False
    try:
        is_mine = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        # It is written once the lock is taken.
        is_marked = filesystem.read_file(folder / _MARK, max_bytes=256) == folder.name.encode()
    except (OSError, AttributeError):  # gone meanwhile, or Windows, which knows no user ids
        return False
    return is_mine and is_marked and not holds_run(folder) and not is_locked(folder / _MARK)
