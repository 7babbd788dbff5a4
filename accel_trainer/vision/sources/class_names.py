"""Compares class names: those of splits, of files, and of a model and its data."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError, listed

Integers = NDArray[np.int64]
"""Class numbers, or the positions of samples, [N]."""
Names = tuple[str, ...]
"""The names of the K classes, in the order of their numbers."""

_HIDDEN = ("Cc", "Cf")


def check_class_names(names: Iterable[str], place: str) -> None:
    """Raise DataError if two different names look alike, or are equal as numbers.

    The former differ in their spaces and line ends, in characters that are not shown, or in how
    Unicode spells their accents. The latter are `1`, `01` and the `1.0` of a column with a gap.
    """
    spellings = defaultdict[str | Decimal, set[str]](set)
    for name in names:
        spellings[_as_shown(name)].add(name)
        number = _as_number(name)
        if number is not None:
            spellings[number].add(name)
    for key, alike in spellings.items():
        if len(alike) > 1:
            one, other = (ascii(name) for name in sorted(alike)[:2])
            how = "look the same" if isinstance(key, str) else "are equal as numbers"
            fact = f"{place} has classes {one} and {other}, which {how}"
            raise DataError("DATA_CLASSES", f"{fact}: give both the same name")


def _as_number(name: str) -> Decimal | None:
    try:
        number = Decimal(name)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _as_shown(name: str) -> str:
    words = unicodedata.normalize("NFC", name).split()
    # Controls and formats, such as joiners and marks of byte order.
    return "".join(each for each in " ".join(words) if unicodedata.category(each) not in _HIDDEN)


def names_in_two_cases(names: Iterable[str]) -> list[str]:
    """Return a line for names that differ only in capital letters, which are classes of their own.

    Raises no error: `A` and `a` may be letters to tell apart.
    """
    alike = defaultdict[str, list[str]](list)
    for name in names:
        alike[_as_shown(name).casefold()].append(name)
    pairs = [" and ".join(sorted(group)) for group in alike.values() if len(group) > 1]
    if not pairs:
        return []
    return [f"classes that differ only in capital letters: {listed(pairs, separator='; ')}"]


def numbers_in(known: Sequence[str], names: Sequence[str]) -> Integers:
    """Return the position in `known` of each of `names`, int64; -1: it is not there."""
    number_of = {name: number for number, name in enumerate(known)}
    return np.array([number_of.get(name, -1) for name in names], np.int64)


def merged_names(lists: Iterable[Sequence[str]]) -> Names:
    """Return the names of all lists, each once, in the order in which they are first listed."""
    return tuple(dict.fromkeys(name for names in lists for name in names))
