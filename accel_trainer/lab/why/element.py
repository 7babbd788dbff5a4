"""The first element in which two tensors differ."""

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
    """An element that differs, and how many do."""

    index: tuple[int, ...]
    values: tuple[Any, Any]
    ulp: int | None
    """How many floating-point numbers they are apart; None for others, and for NaN."""
    num_different: int
    num_elements: int

    def describe(self) -> str:
        """Return a text about it."""
        first, second = (
            repr(value) if isinstance(value, float) else str(value) for value in self.values
        )
        apart = "" if self.ulp is None else f" ({self.ulp:,} ulp apart)"
        if not self.index:
            return f"{first} and {second}{apart}"
        place = ", ".join(map(str, self.index))
        count = f"{self.num_different:,} of {self.num_elements:,} elements differ"
        return f"{count}, first [{place}]: {first} and {second}{apart}"


def first_element(one: Path, other: Path) -> Element | str | None:
    """Return the first difference of what two replays, by their folders, have kept.

    A text if it has no elements; None if it is equal, or was not kept.
    """
    left, right = _kept_in(one), _kept_in(other)
    if left is None or right is None:
        return None
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return None if left is right or str(left) == str(right) else f"{left} and {right}"
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{left.dtype} {[*left.shape]} and {right.dtype} {[*right.shape]}"
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
    where = different.nonzero()[0].tolist() if one.ndim else []
    place = tuple(map(int, where))
    values = (one[place].item(), other[place].item())
    return Element(
        index=place,
        values=values,
        ulp=_ulp(bits[0][place], bits[1][place]) if _is_number(one, values) else None,
        num_different=int(different.sum()),
        num_elements=one.numel(),
    )


def _is_number(tensor: Tensor, values: tuple[Any, Any]) -> bool:
    return tensor.is_floating_point() and all(value == value for value in values)


def _ulp(one: Tensor, other: Tensor) -> int:
    """Return the distance of two floats, given as integers: the floats between them, plus 1."""
    places = [_place(int(each), each.itemsize * 8) for each in (one, other)]
    return abs(places[0] - places[1])


def _place(bits: int, num_bits: int) -> int:
    """Return the number of a float in the order of floats; 0 for 0.0 and -0.0."""
    return bits if bits >= 0 else -(bits & ((1 << (num_bits - 1)) - 1))
