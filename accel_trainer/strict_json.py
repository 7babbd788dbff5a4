"""Bounded parsing of untrusted JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .storage import read_file

MAX_BYTES = 8 * 2**20


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as ASCII JSON. Raises ValueError for NaN, and for more than a checkpoint may have of it."""
    separators = (",", ":") if indent is None else None
    data = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_BYTES}")
    return data


def parse_json(data: bytes) -> Any:
    """Return the value of `data`, which is as bounded as its source. Raises ValueError."""
    try:
        return json.loads(data.decode())  # of bytes, Python would guess the encoding
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a file. Raises OSError or ValueError."""
    value = parse_json(read_file(path, max_bytes=max_bytes))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not an object")
    return value
