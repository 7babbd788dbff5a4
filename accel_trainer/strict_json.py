"""Bounded parsing of untrusted JSON: at most a few MiB, no NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from .storage import read_file

MAX_BYTES = 8 * 2**20


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as ASCII JSON. Raises ValueError for NaN, and for more than `parse_json` takes back."""
    separators = (",", ":") if indent is None else None
    data = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    _check_size(data)
    return data


def parse_json(data: bytes) -> Any:
    """Return the value of `data`. Raises ValueError."""
    _check_size(data)
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises OSError or ValueError."""
    value = parse_json(read_file(path, max_bytes=MAX_BYTES))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not an object")
    return value


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_BYTES}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
