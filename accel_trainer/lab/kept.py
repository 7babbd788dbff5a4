"""The folder of what a command trains, which users may keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_trainer import OutputError
from accel_trainer.commands import prepare_directory, scratch_folder


@contextmanager
def kept_folder(keep: Path | None) -> Iterator[Path]:
    """Yield the new or empty folder `keep`, or a temporary one.

    Raises OutputError if `keep` is not empty.
    """
    if keep is None:
        with scratch_folder("replays") as temporary:
            yield temporary
        return
    folder = prepare_directory(keep).resolve()
    if any(folder.iterdir()):
        raise OutputError("OUT_DIR", f"--keep {keep} is not empty: give a new folder")
    yield folder
