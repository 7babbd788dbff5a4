"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 process`, `2 processes`."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural}"
