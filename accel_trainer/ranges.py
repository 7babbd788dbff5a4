"""The ranges that numbers of a config must be in: each said in one way, wherever it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers that are allowed, in `words` that follow "set it"."""

    words: str
    has: Callable[[float], bool]

    def check(self, config: object, group: str, *names: str) -> None:
        """Raise ConfigError if a named value of `config`, or a part of one, is out of range. None is in every range."""
        for name in names:
            value = getattr(config, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number is None or self.has(number) for number in numbers):
                raise ConfigError("CONFIG", f"{group}.{name} is {value}: set it {self.words}")


AT_LEAST_ONE = Range("to 1 or more", lambda number: number >= 1)
ABOVE_ZERO = Range("above 0", lambda number: number > 0)
POSITIVE = Range("above 0, and finite", lambda number: 0 < number < math.inf)
NOT_NEGATIVE = Range("to at least 0, and finite", lambda number: 0 <= number < math.inf)
FRACTION = Range("between 0 and 1", lambda number: 0 <= number <= 1)
BELOW_ONE = Range("to at least 0 and below 1", lambda number: 0 <= number < 1)
INSIDE_ONE = Range("above 0 and below 1", lambda number: 0 < number < 1)
