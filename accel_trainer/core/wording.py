"""Words of messages: a number with its noun, and what a value is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 process`, `2 batches`."""
    plural = "" if number == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{number} {noun}{plural}"


def describe_tensor(value: Any) -> str:
    """Return dtype and shape of a tensor, `float32 [16, 10]`, or what another value is."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, str):
        return f"{value!r:.60}"
    if hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    keys = f" with {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
    return f"an object of type {type(value).__name__}{keys}"
