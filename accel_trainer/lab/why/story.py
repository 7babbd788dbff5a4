"""The lines of an answer, and values in them."""

from __future__ import annotations

from accel_trainer.commands import Say


def short(value: object, most: int) -> str:
    """Return a value as text of at most `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


class Story:
    """Passes each line on at once, and keeps it."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Tell a line."""
        self._lines.append(line)
        self._say(line)

    @property
    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self._lines)
