"""Conditions on the rows of a run, such as `optim/grad_norm > 10 and not isnan(train/loss)`.

From what binds weakest to what binds strongest:

    or:         and {"or" and}
    and:        not {"and" not}
    not:        "not" not | comparison
    comparison: "(" or ")" | ("isnan" | "isfinite") "(" value ")" | value ("<" | ">=" | ...) value
    value:      a number, or the name of a column
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeVar

from accel_trainer import ConfigError
from accel_trainer.commands import Row, shortened

Holds = Callable[[Row], bool | None]
Value = Callable[[Row], float | None]
T = TypeVar("T")

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w./])"
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER})|(?P<word>[\w.-]+(?:/[\w.-]+)*)|(?P<sign>[<>=!]=|[<>()])|(?P<other>\S)"
)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_TESTS: dict[str, Callable[[float], bool]] = {"isnan": math.isnan, "isfinite": math.isfinite}
_WORDS = {"and", "or", "not", *_TESTS}
_MAX_SHOWN = 12


class Token(NamedTuple):
    """A word of a condition, and where it begins, counted from 0; the end is an empty text."""

    kind: str
    text: str
    start: int


@dataclass(frozen=True)
class Condition:
    """A condition on a row."""

    text: str
    names: frozenset[str]
    """The columns that it reads."""
    holds: Holds
    """Whether it holds in a row; None: the row lacks a column that decides."""


def parse_condition(text: str, columns: Collection[str] | None) -> Condition:
    """Return the condition in `text`.

    Raises:
        ConfigError: it is none, or names something else than one of `columns` (None: any name).
    """
    tokens = [
        Token(str(found.lastgroup), found[0], found.start()) for found in _TOKEN.finditer(text)
    ]
    parser = _Parser(text, columns, [*tokens, Token("end", "", len(text))])
    holds = parser.either()
    parser.expect("", "`and`, `or` or the end")
    return Condition(text, frozenset(parser.names), holds)


@dataclass
class _Parser:
    """Reads a condition from left to right; each method reads what it is named after."""

    text: str
    columns: Collection[str] | None
    tokens: list[Token]
    """Those that are not read yet."""
    names: set[str] = field(default_factory=set)

    @property
    def next(self) -> Token:
        """The next token."""
        return self.tokens[0]

    def take(self) -> str:
        """Return the next token's text, and go on behind it."""
        return self.tokens.pop(0).text

    def takes(self, text: str) -> bool:
        """Go on behind the next token if it is `text`; return whether it is."""
        return self.next.text == text and self.take() == text

    def expect(self, text: str, words: str) -> None:
        """Go on behind `text`, or raise ConfigError."""
        if not self.takes(text):
            self.fail(f"expected {words}")

    def fail(self, fact: str) -> NoReturn:
        """Raise ConfigError about the next token."""
        found = self.next
        place = f"character {found.start + 1} ({found.text})" if found.text else "its end"
        fix = "compare columns with numbers, as in train/loss > 1 and optim/grad_norm > 10"
        if self.columns is not None:
            fix = f"the columns are {shortened(sorted(self.columns), most=_MAX_SHOWN)}"
        raise ConfigError("WHERE", f"--where {self.text!r}, {place}: {fact}: {fix}")

    def either(self) -> Holds:
        """Read what `or` joins."""
        return self.joined_by("or", self.both, decides=True)

    def both(self) -> Holds:
        """Read what `and` joins."""
        return self.joined_by("and", self.negation, decides=False)

    def joined_by(self, word: str, part: Callable[[], Holds], *, decides: bool) -> Holds:
        """Read parts with a word between them: one that is `decides` decides."""
        parts = [part()]
        while self.takes(word):
            parts.append(part())

        def holds(row: Row) -> bool | None:
            found = [each(row) for each in parts]
            return decides if decides in found else None if None in found else not decides

        return holds

    def negation(self) -> Holds:
        """Read a comparison, perhaps after `not`."""
        if self.takes("not"):
            return _known(operator.not_, self.negation())
        return self.comparison()

    def comparison(self) -> Holds:
        """Read a comparison, a test, or what is in parentheses."""
        if self.next.text == "(":
            return self.in_parentheses(self.either)
        if self.next.text in _TESTS:
            return _known(_TESTS[self.take()], self.in_parentheses(self.value))
        left = self.value()
        if self.next.text not in _COMPARISONS:
            self.fail(f"expected one of {' '.join(_COMPARISONS)}")
        return _known(_COMPARISONS[self.take()], left, self.value())

    def in_parentheses(self, read: Callable[[], T]) -> T:
        """Return what `read` reads between parentheses."""
        self.expect("(", "an opening parenthesis")
        found = read()
        self.expect(")", "a closing parenthesis")
        return found

    def value(self) -> Value:
        """Read a number or a column."""
        kind, text, _ = self.next
        if kind == "number":
            number = float(self.take())
            return lambda row: number
        if kind != "word" or text in _WORDS:
            self.fail("expected a column or a number")
        if self.columns is not None and text not in self.columns:
            near = difflib.get_close_matches(text, self.columns, n=1)
            self.fail(f"no row has it{f', perhaps {near[0]}' if near else ''}")
        self.names.add(self.take())
        return lambda row: row.get(text)


def _known(function: Callable[..., bool], *values: Value) -> Holds:
    """Return a function of some values, which is unknown if one of them is."""

    def holds(row: Row) -> bool | None:
        found = [value(row) for value in values]
        return None if None in found else function(*found)

    return holds
