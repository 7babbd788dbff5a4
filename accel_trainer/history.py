"""`metrics.jsonl`: append-only, one JSON object a line, cut back to the checkpoint that a run resumes from."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .storage import AppendFile

_logger = logging.getLogger(__name__)


class History:
    """The rows of a run. Its length is part of every checkpoint, so that no row is ever there twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendFile(path)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._file.size

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row. NaN and inf are written as strings: JSON has neither."""
        values = {name: _json_value(value) for name, value in row.items()}
        self._file.append(json.dumps(values, allow_nan=False).encode() + b"\n")

    def truncate(self, size: int) -> None:
        """Drop the rows after the first `size` bytes."""
        if self.size < size:
            _logger.warning(
                "%s is %d bytes, %d at the checkpoint: rows before it are missing",
                self._path,
                self.size,
                size,
            )
            return
        self._file.truncate(size)

    def sync(self) -> None:
        """Make the rows durable (fsync)."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value
