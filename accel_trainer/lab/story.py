"""The lines of an answer."""

from __future__ import annotations

from accel_trainer.commands import Say


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
