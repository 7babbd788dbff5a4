"""Finds pictures that use so little of their range that they are almost one shade to a model.

The usual cause is a file with more bits than the pixels need, such as 12 bits in 16. Pixels are
those after decoding: 0 to 255.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from .photo_decode import decode_photo, format_of

_NARROW = 32  # values, an eighth of all
_MAX_SHRINK = 8


class PixelRange(NamedTuple):
    """The smallest and the largest pixel of some pictures, and their number; none at first."""

    low: int = 255
    high: int = 0
    num_pictures: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether the pictures use less than an eighth of the range."""
        return self.high - self.low < _NARROW

    def __or__(self, other: PixelRange) -> PixelRange:
        """Return the range of the pictures of both."""
        return PixelRange(
            min(self.low, other.low),
            max(self.high, other.high),
            self.num_pictures + other.num_pictures,
        )

    def note(self, what: str) -> str | None:
        """Return a line for the user if the range is narrow; `what` describes the pictures."""
        if not self.is_narrow or not self.num_pictures:
            return None
        fact = (
            f"the pixels of the {what} ({self.num_pictures:,} looked at) are {self.low} to "
            f"{self.high} of 0 to 255 after decoding, less than an eighth of the range"
        )
        factor = 256 // (self.high + 1)
        example = f", such as by multiplying them by {factor}" if factor > 1 else ""
        return f"{fact}: stretch them over the range of the format before saving{example}"


def range_of(pixels: NDArray[np.uint8]) -> PixelRange:
    """Return the range of one picture."""
    return PixelRange(int(pixels.min()), int(pixels.max()), 1)


class FormatRanges:
    """The range of the pictures of each format, such as `PNG I;16`.

    Once the range of a format is not narrow, its other pictures are not decoded.
    """

    def __init__(self) -> None:
        self._by_format: dict[str, PixelRange] = {}

    def look_at(self, data: bytes, name: str) -> None:
        """Add an encoded picture; a broken one is left to whoever needs it."""
        with suppress(DataError):
            kind = format_of(data, name)
            known = self._by_format.get(kind, PixelRange())
            found = PixelRange(num_pictures=1)
            if known.is_narrow:
                found = range_of(decode_photo(data, name, shrink=_MAX_SHRINK))
            self._by_format[kind] = known | found

    def notes(self, what: str) -> list[str]:
        """Return a line for each format whose range is narrow."""
        notes = (found.note(f"{what} in {kind}") for kind, found in self._by_format.items())
        return [note for note in notes if note]
