"""Pages and pictures under names that users choose: they replace only earlier ones of a command."""

from __future__ import annotations

import os
from pathlib import Path

from ...core import filesystem
from ...core.errors import OutputError
from ...core.run_dir import prepare_directory

GENERATOR = '<meta name="generator" content="accel-trainer">'
"""The mark of a page; it has to be in its head."""
SOFTWARE = {"Software": "accel-trainer"}
"""The mark of a picture, as metadata for `savefig`."""
_MARKS = (
    GENERATOR.encode(),
    b"Software\0accel-trainer",
    b"default-src &#39;none&#39;; script-src &#39;sha256-",  # reports of versions up to 0.3
)
_HEAD_BYTES = 8192


def refuse_other_file(path: Path, flag: str) -> None:
    """Raise OutputError if `path`, which `flag` has named, is not to be written.

    It is a file that no command has written, or its folder cannot be written to; a missing folder
    is created. To be called before any work.
    """
    prepare_directory(path.absolute().parent)
    try:
        if not os.path.lexists(path) or is_own_file(path):
            return
    except OSError as error:
        raise OutputError(
            "FILE_EXISTS",
            f"{flag} {path} cannot be replaced ({error.strerror}): choose a different name",
        ) from error
    raise OutputError(
        "FILE_EXISTS",
        f"{flag} {path} would overwrite a file that accel-trainer did not write: move it away, "
        "or choose a different name",
    )


def is_own_file(path: Path) -> bool:
    """Whether a command has written the page or picture. Raises OSError."""
    with filesystem.open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    return any(mark in head for mark in _MARKS)


def write_own_file(path: Path, data: bytes, flag: str) -> None:
    """Write a page or a picture, or replace an earlier one. Raises OutputError."""
    refuse_other_file(path, flag)  # it may have been written meanwhile
    try:
        filesystem.write_file_atomic(path, data)
    except OSError as error:
        raise OutputError(
            "FILE_NOT_WRITABLE",
            f"{flag} {path} cannot be written ({error.strerror}): choose a different one",
        ) from error
