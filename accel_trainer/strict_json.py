"""JSON as it comes from strangers: bounded in size, depth, values and digits; no NaN, no key twice.

`dump_json` keeps to the limits of `parse_json`, so that what was saved can be loaded.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_BYTES = 8 * 2**20
# Python takes about 100 bytes for a parsed value, so this bounds the memory that a hostile file can ask for.
MAX_VALUES = 500_000
MAX_DEPTH = 32
_MAX_DIGITS = 40


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as ASCII JSON. Raises ValueError where `parse_json` would not take it back."""
    separators = (",", ":") if indent is None else None
    data = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    _check_size(data)
    _check_depth(value, MAX_DEPTH)
    return data


def parse_json(data: bytes) -> Any:
    """Return the value of `data`. Raises ValueError for everything that `dump_json` does not write."""
    _check_size(data)
    try:
        value = json.loads(
            data.decode(),
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse,
            object_pairs_hook=_parse_object,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value, MAX_DEPTH)
    return value


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_BYTES}")
    # Counting the separators takes a hundredth of the time of parsing, and none of its memory.
    if (values := data.count(b",") + data.count(b"[") + data.count(b"{")) > MAX_VALUES:
        raise ValueError(f"{values} JSON values, more than {MAX_VALUES}")


def _check_depth(value: object, remaining: int) -> None:
    if isinstance(value, dict | list):
        if remaining == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, remaining - 1)


def _parse_int(digits: str) -> int:
    # Python's own conversion is quadratic in the digits.
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    if len(digits) > _MAX_DIGITS or not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits[:_MAX_DIGITS]} is out of range")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result
