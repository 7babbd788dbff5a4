"""Temporary folders of commands; what a killed command left is removed by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.run_dir import is_in_use, run_lock

_PREFIX = "accel-trainer-"
_LOCK = "run.lock"


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Yield a new temporary folder, which is removed at the end of the block.

    It is locked as long as this process lives, so that another command can tell that it is in use,
    and its name has the process id: testing a lock that this process holds would free it.
    """
    prefix = f"{_PREFIX}{name}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        folder = Path(path).resolve()
        for other in filter(_is_abandoned, folder.parent.glob(f"{_PREFIX}*-*-*")):
            shutil.rmtree(other, ignore_errors=True)
        with run_lock(folder / _LOCK):
            yield folder


def _is_abandoned(folder: Path) -> bool:
    """Whether a scratch folder is of this user, and of a process that has ended."""
    _, _, process_id = folder.name.rpartition("-")[0].rpartition("-")
    lock = folder / _LOCK
    try:
        is_mine = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        has_owner = lock.stat().st_size > 0  # written once the lock is taken
    except (OSError, AttributeError):  # gone meanwhile, or Windows, which knows no user ids
        return False
    return is_mine and has_owner and process_id != str(os.getpid()) and not is_in_use(folder)
