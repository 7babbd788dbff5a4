"""The rows that a run has logged, as anybody may read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from .filesystem import read_lines


def read_history(run: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's `metrics.jsonl`; NaN and inf are strings.

    The run may be writing more rows: a line that is not complete yet is left out.

    Raises:
        OSError: the file cannot be read.
    """
    for line in read_lines(Path(run) / "metrics.jsonl"):
        yield json.loads(line)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a metric's value is a single number, for rows and trackers."""
    return isinstance(value, int | float) and not isinstance(value, bool)
