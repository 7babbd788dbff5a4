"""JSON that is bounded by its size, in memory and in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .filesystem import Chunk, read_file, write_file_atomic

MAX_BYTES = 8 * 2**20


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as ASCII JSON. Raises ValueError for NaN, and above `MAX_BYTES`."""
    separators = (",", ":") if indent is None else None
    data = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_BYTES}")
    return data


def parse_json(data: Chunk, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value in `data`, as `json.loads` does. Raises ValueError if it is not JSON."""
    try:
        # From bytes, Python would guess the encoding.
        return json.loads(str(data, "utf-8"), object_hook=object_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError or ValueError if there is none."""
    value = parse_json(read_file(path, max_bytes=max_bytes))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not an object")
    return value


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented JSON. Raises OSError, and ValueError as `dump_json`."""
    write_file_atomic(path, dump_json(value, indent=1))
