"""Finds which of many changes, made one after another, change an outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar


class Outcome(Protocol):
    """What came of some changes; two of them are equal or not."""

    @property
    def refused(self) -> str | None:
        """Why the changes are not possible together; None: they are."""


T = TypeVar("T", bound=Outcome)
Try = Callable[[Sequence[frozenset[str]]], Sequence[T]]
"""Returns what comes of each of several sets of changes."""


@dataclass(frozen=True)
class Change(Generic[T]):
    """Changes that make a difference: one, or several that are not possible one by one."""

    names: tuple[str, ...]
    before: T
    after: T


def find_changes(names: Sequence[str], outcomes: Try[T]) -> list[Change[T]]:
    """Return which of `names` change the outcome when they are made one after another.

    If the outcome after some of them is equal to that after some more, those between are taken to
    change nothing, and are not tried by themselves. So about log2(len(names)) sets are tried for
    each change that is found.
    """
    known: dict[int, T] = {}
    wanted = [0, len(names)]
    while wanted:
        tried = outcomes([frozenset(names[:count]) for count in wanted])
        known |= dict(zip(wanted, tried, strict=True))
        possible = [count for count in sorted(known) if known[count].refused is None]
        parts = [(low, high) for low, high in pairwise(possible) if known[low] != known[high]]
        wanted = [middle for part in parts for middle in _middle(*part, known=known)]
    return [Change(tuple(names[low:high]), known[low], known[high]) for low, high in parts]


def _middle(low: int, high: int, *, known: dict[int, T]) -> list[int]:
    """Return the number in the middle between two that was not tried yet, if any."""
    left = [count for count in range(low + 1, high) if count not in known]
    return sorted(left, key=lambda count: abs(2 * count - low - high))[:1]
