"""The rows that a run has logged, as anybody may read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from .errors import ConfigError
from .filesystem import read_lines

_MAX_NAME = 150  # a name is also a part of the names of files


def read_history(run: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's `metrics.jsonl`; NaN and inf are strings.

    The run may be writing more rows: a line that is not complete yet is left out.

    Raises:
        OSError: the file cannot be read.
    """
    for line in read_lines(Path(run) / "metrics.jsonl"):
        yield json.loads(line)


def check_name(name: str, owner: str) -> None:
    """Raise ConfigError unless a number of `owner` can have `name`, in rows, tables and pages."""
    parts = name.split("/")
    if len(name) > _MAX_NAME or not name.isprintable() or not all(p.strip(". ") for p in parts):
        shown = name if len(name) <= _MAX_NAME else f"{name[:40]}..."
        raise ConfigError(
            "NAME",
            f"{owner} has a number named {shown!r}: use 1 to {_MAX_NAME} printable characters, "
            "with more than dots between slashes",
        )


def is_number(value: object) -> TypeGuard[float]:
    """Whether a metric's value is a single number, for rows and trackers."""
    return isinstance(value, int | float) and not isinstance(value, bool)
