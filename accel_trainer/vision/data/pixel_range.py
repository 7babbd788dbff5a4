"""Finds pictures that use so little of their range that they are almost one shade to a model.

The usual cause is a file with more bits than the pixels need, such as 12 bits in 16. Each picture
is looked at by itself: one of full range beside it would hide it. Pixels are those after decoding,
0 to 255.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...core.errors import DataError
from .photo_decode import Pixels, decode_photo, format_of, read_header

_NARROW = 32  # values, an eighth of all
_WHITE = 255 - _NARROW
_SHARE = 8  # one of so many pictures is no single odd one
_MAX_SHRINK = 8
_PIXELS_PER_PHOTO = 2**18  # 256 of any size take a second at most


class PixelRange(NamedTuple):
    """The smallest and the largest pixel of a picture."""

    low: int
    high: int

    @property
    def is_narrow(self) -> bool:
        """Whether the picture uses less than an eighth of the range."""
        return self.high - self.low < _NARROW


def range_of(pixels: Pixels) -> PixelRange:
    """Return the range of one picture."""
    return PixelRange(int(pixels.min()), int(pixels.max()))


class PixelRanges:
    """The ranges of pictures by their format, such as `PNG I;16`, and their class."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[PixelRange]]] = {}
        self._credit = 0

    def add(self, found: PixelRange, kind: str, class_name: str) -> None:
        """Add the range of a picture; `class_name` is empty if it has several classes."""
        self._found.setdefault(kind, defaultdict(list))[class_name].append(found)

    def look_at(self, data: bytes, name: str, class_name: str) -> None:
        """Add an encoded photo, or, of large ones, one in a few: decoding takes long.

        A broken one is left to whoever needs it.
        """
        self._credit += _PIXELS_PER_PHOTO
        if self._credit < 0:
            return
        with suppress(DataError):
            header = read_header(data, name)
            self._credit -= header.height * header.width
            pixels = decode_photo(data, name, header=header, shrink=_MAX_SHRINK)
            self.add(range_of(pixels), format_of(data, name), class_name)

    def notes(self, what: str) -> list[str]:
        """Return a line for each format of which some pictures, or half of a class, are narrow."""
        return [
            note
            for kind, by_class in self._found.items()
            for note in _notes(f"{what} in {kind}" if kind else what, kind, by_class)
        ]


def _notes(what: str, kind: str, by_class: dict[str, list[PixelRange]]) -> Iterator[str]:
    narrow = {name: [each for each in found if each.is_narrow] for name, found in by_class.items()}
    dark_classes = [
        name
        for name, found in narrow.items()
        if name and len(found) > 1 and 2 * len(found) >= len(by_class[name])
    ]
    found = [each for of_class in narrow.values() for each in of_class]
    total = sum(map(len, by_class.values()))
    is_usual = len(found) == total or (len(found) > 1 and _SHARE * len(found) >= total)
    if not found or not (is_usual or dark_classes):
        return
    most = max(narrow, key=lambda name: len(narrow[name]))
    of_class = f" ({len(narrow[most]):,} of class {most})" if most and len(by_class) > 1 else ""
    yield (
        f"{len(found):,} of the {total:,} {what} that were looked at{of_class} use less than an "
        f"eighth of the range after decoding, such as {found[0].low} to {found[0].high} of 0 to "
        f"255: {_fix(found, kind)}"
    )


def _fix(found: Sequence[PixelRange], kind: str) -> str:
    if all(each.low > _WHITE for each in found) and kind.split()[-1:] in (
        ["RGBA"],
        ["LA"],
        ["PA"],
        ["P"],
        ["RGBA;16"],
    ):
        return "transparent pixels become white, so save white ones on a darker ground"
    factor = 256 // (max(each.high for each in found) + 1)
    example = f", such as by multiplying them by {factor}" if factor > 1 else ""
    return f"stretch them over the range of the format before saving{example}"
