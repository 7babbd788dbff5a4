"""`metrics.jsonl`: one JSON object a line; a resume removes the rows after its checkpoint."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.filesystem import AppendFile, read_chunks
from ..core.logger import logger

Row = Mapping[str, Any]
"""A row of a run's history: its numbers by name, and where they belong."""


class MetricsFile:
    """The rows of a run. Every checkpoint has the file's length, so that no resume repeats a row.

    Rows that cannot be written are kept, and are written together with the next one. Training
    continues, but no checkpoint is committed before all rows are on the disk (`sync`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)
        # A power loss may leave half a line, which the next row must not continue.
        self._file.drop_half_line()
        self._unwritten = b""
        self.kept_bytes = 0
        """How many bytes the checkpoint had that the run continues from."""
        # A row may be appended while the thread that saves a checkpoint calls `sync`.
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Length in bytes, including the rows that are not written yet."""
        with self._lock:
            return self._file.size + len(self._unwritten)

    def append(self, row: Row) -> None:
        """Write a row. NaN and inf are written as strings: JSON has neither."""
        with self._lock:
            is_first = not self._unwritten
            self._unwritten += json.dumps(without_nan(row), allow_nan=False).encode() + b"\n"
            try:
                self._write()
            except OSError as error:
                if is_first:
                    logger.warning(
                        "a row of %s cannot be written yet and is kept: %s",
                        self.path,
                        error.strerror,
                    )

    def _write(self) -> None:
        if self._unwritten:
            self._file.append(self._unwritten)
            self._unwritten = b""

    def truncate(self, size: int) -> None:
        """Drop the rows after the first `size` bytes."""
        if self.size < size:
            logger.warning(
                "%s has %d bytes, but had %d at the checkpoint: earlier rows are missing",
                self.path,
                self.size,
                size,
            )
        else:
            self._file.truncate(size)
            self._file.drop_half_line()  # if somebody has edited the rows, one may be cut in half

    def copy_rows(self, path: Path) -> None:
        """Append the rows of the file `path`. Raises OSError."""
        for chunk in read_chunks(path):
            self._file.append(chunk)

    def sync(self) -> None:
        """Make all rows durable (fsync). Raises OSError."""
        with self._lock:
            self._write()
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def without_nan(value: Any) -> Any:
    """Return NaN and inf in nested values as texts: JSON has neither."""
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(without_nan, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
