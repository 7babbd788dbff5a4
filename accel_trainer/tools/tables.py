"""Numbers and tables for people, in plain columns that a terminal and a file show alike."""

from __future__ import annotations

from collections.abc import Sequence

_NUMERIC = {"step", "epoch", "best", "last", "images/s", "wall"}


def format_number(metric: str, value: float) -> str:
    """Return a metric as people write it: a share in percent, a count in full, anything else with four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if is_share(metric) else f"{value:.4g}"


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is read in percent."""
    return metric.endswith(("accuracy", "_fraction"))


def format_duration(seconds: float) -> str:
    """Return a time as `42 s`, `8 min 42 s` or `3 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, is_marked: Sequence[bool]) -> None:
    """Print rows of text under their columns; marked ones begin with a star."""
    shown = [
        [" ", *columns],
        *(["*" if mark else " ", *row] for mark, row in zip(is_marked, rows, strict=True)),
    ]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = [
            cell.rjust(width) if name in _NUMERIC else cell.ljust(width)
            for name, cell, width in zip(["", *columns], row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())
