"""Whether two runs agree, and where they begin to differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rows import Row, Rows


@dataclass(frozen=True)
class Difference:
    """The first place at which two runs differ, and what each has there; {}: nothing."""

    step: int
    event: str
    one: Row
    other: Row

    @classmethod
    def of(cls, one: Rows, other: Rows) -> Difference | None:
        """Return the first difference by steps, then in the order of the places; None: none.

        A place or a name that only one has is a difference.
        """
        places = sorted({**one, **other}, key=lambda place: place[0])
        found = (cls(*place, one.get(place, {}), other.get(place, {})) for place in places)
        return next((each for each in found if each.names), None)

    @property
    def names(self) -> list[str]:
        """What differs there, in the order of the rows."""
        names = dict.fromkeys([*self.one, *self.other])
        return [name for name in names if self.one.get(name) != self.other.get(name)]

    def values(self, name: str) -> tuple[Any, Any]:
        """Return both values of a name; None where it is missing."""
        return self.one.get(name), self.other.get(name)
