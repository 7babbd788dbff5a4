"""Formats numbers and tables as plain text, and prints them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ...callbacks import console
from ...callbacks.console import terminal_columns, wrap_lines
from ...callbacks.metrics_file import without_nan

JsonObject = dict[str, Any]
"""Values of JSON by name: what `--json` prints, and what files of a run hold."""
Numbers = dict[str, float]
"""Numbers by name, such as metrics."""
Say = Callable[[str], None]
"""Called with each line about the progress of a command."""

# Control characters of ASCII and Latin-1, characters that change the direction of text or that
# nobody sees, and unpaired surrogates, which cannot be printed.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
_INDENT = "    "
_NUM_CLASSES = 10  # at either end
_NUMERIC = {"step", "epoch", "best", "last", "samples/s", "wall", "bytes"}


def format_number(metric: str, value: float) -> str:
    """Return a metric as text: fractions in percent, counts in full, the rest with four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if is_fraction(metric) else f"{value:.4g}"


def is_fraction(metric: str) -> bool:
    """Whether a metric is between 0 and 1, and shown in percent."""
    return metric.endswith(("accuracy", "_fraction"))


def format_duration(seconds: float) -> str:
    """Return a time as `42 s`, `8 min 42 s` or `3 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def show(text: str) -> None:
    """Print `text`, folded to the width of a terminal."""
    tell(wrap_lines(text, terminal_columns()))


def say(line: str) -> None:
    """Print a line at once, folded to the width of a terminal."""
    show(line)
    console.flush()


def say_unless(is_quiet: bool) -> Say:
    """Return `say`, or for a command that prints JSON what says nothing."""
    return (lambda line: None) if is_quiet else say


def tell(text: object, *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print `text` without folding its lines.

    Control characters, which file and class names may contain, are printed as escapes.
    """
    print(printable(str(text)), file=file, flush=flush)


def tell_json(value: Any) -> None:
    """Print a value as a line of JSON; NaN and inf, which JSON lacks, are texts, as in rows."""
    try:
        line = json.dumps(value, allow_nan=False)
    except ValueError:
        line = json.dumps(without_nan(value), allow_nan=False)
    tell(line)


def printable(text: str) -> str:
    """Return `text` with escapes instead of control characters; line breaks and tabs stay."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text under their columns, numbers aligned to the right.

    On a terminal that is too narrow, the columns that do not fit are printed below, indented.
    """
    lines = [[cell.replace("\n", "\\n") for cell in line] for line in (columns, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligns = [">" if name in _NUMERIC else "<" for name in columns]
    groups = _groups(widths, terminal_columns())
    printed = []
    for line in lines:
        for number, group in enumerate(groups):
            if number == 0 or any(line[i] for i in group):
                cells = "  ".join(f"{line[i]:{aligns[i]}{widths[i]}}" for i in group)
                printed.append(_INDENT * (number > 0) + cells.rstrip())
    return "\n".join(printed)


def both_ends(rows: list[list[str]]) -> list[list[str]]:
    """Return the first and the last rows of classes, and a row with the number left out."""
    num_left_out = len(rows) - 2 * _NUM_CLASSES
    if num_left_out <= 0:
        return rows
    between = [f"({num_left_out:,} more classes)", *[""] * (len(rows[0]) - 1)]
    return [*rows[:_NUM_CLASSES], between, *rows[-_NUM_CLASSES:]]


def _groups(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Return the columns of each printed line of a row, so that no line is longer than `room`."""
    groups: list[list[int]] = [[]]
    for column, width in enumerate(widths):
        taken = len(_INDENT) + sum(widths[i] + 2 for i in groups[-1])
        if room is not None and groups[-1] and taken + width > room:
            groups.append([])
        groups[-1].append(column)
    return groups
