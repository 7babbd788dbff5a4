"""The first element in which two values differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_trainer.commands import filesystem

_MAX_BYTES = 2**24
_MAX_TEXT = 60
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Element:
    """What differs, in words, and where that is known: the first element that does."""

    text: str
    index: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    ulp: int | None = None
    """How many floating-point numbers they are apart; None for others, and for NaN."""


def first_element(one: Path, other: Path) -> Element | None:
    """Return the first difference of what two replays, by their folders, have kept.

    None: it is equal, or was not kept.
    """
    left, right = _kept_in(one), _kept_in(other)
    if left is None or right is None:
        return None
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        if str(left) == str(right):
            return None
        return Element(f"{left} and {right}", values=(left, right))
    if left.dtype != right.dtype or left.shape != right.shape:
        return Element(f"{left.dtype} {[*left.shape]} and {right.dtype} {[*right.shape]}")
    return compare_tensors(left, right)


def _kept_in(folder: Path) -> Tensor | str | None:
    """Return the tensor that `trace.py` has kept, or the text of another value."""
    if (folder / "kept.safetensors").exists():
        return load_file(folder / "kept.safetensors")["kept"]
    if (folder / "kept.txt").exists():
        text = filesystem.read_file(folder / "kept.txt", max_bytes=_MAX_BYTES).decode()
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    return None


def compare_tensors(one: Tensor, other: Tensor) -> Element | None:
    """Return the first element whose bits differ, in logical order; None if all are equal."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    bits = [each.contiguous().view(_INTEGERS[each.itemsize]) for each in (one, other)]
    different = bits[0] != bits[1]
    if not different.any():
        return None
    index = tuple(map(int, different.nonzero()[0]))
    values = (one[index].item(), other[index].item())
    text = "{!r} and {!r}".format(*values)
    ulp = None
    if one.is_floating_point() and all(value == value for value in values):
        first, second = (_number_of(each[index]) for each in bits)
        ulp = abs(first - second)
        text += f" ({ulp:,} ulp apart)"
    if index:
        count = f"{int(different.sum()):,} of {one.numel():,} elements differ"
        text = f"{count}, first [{', '.join(map(str, index))}]: {text}"
    return Element(text, index, values, ulp)


def _number_of(bits: Tensor) -> int:
    """Return the number of a float, given as an integer, in the order of floats.

    It is 0 for 0.0 and -0.0.
    """
    number = int(bits)
    return number if number >= 0 else -(number & ((1 << (8 * bits.itemsize - 1)) - 1))
