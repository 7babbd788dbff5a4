"""Trains a recipe without showing what it says, unless it fails."""

from __future__ import annotations

import sys
from collections.abc import Collection
from tempfile import TemporaryFile

from accel_trainer import ExitCode, OutputError
from accel_trainer.commands import Start, Stops, tell, train_recipe


class RecipeError(OutputError):
    """A recipe failed when it was trained; `exit_code` is what it `ended_with`, if it is ours."""

    def __init__(self, code: str, message: str, ended_with: int) -> None:
        super().__init__(code, message)
        if ended_with in [*ExitCode]:  # not by a signal, or by another program
            self.exit_code = ExitCode(ended_with)


def train_silently(
    start: Start,
    command: str,
    what: str,
    *,
    may_end: Collection[int],
    received: Stops | None = None,
) -> None:
    """Train as `start` says; `received` is that of `train_recipe`.

    Raises RecipeError with the name of the `command` unless it ends with a code that it `may_end`
    with; what the recipe said is then printed on stderr. `what` is trained, in words.
    """
    code, said = caught(start, received)
    if code not in may_end:
        tell(said, file=sys.stderr)
        fact = f"{what} ended with exit code {code}"
        raise RecipeError(command, f"{fact}: see its error above", code)


def caught(start: Start, received: Stops | None = None) -> tuple[int, str]:
    """Train as `start` says; return the exit code, and what the recipe said on stderr."""
    with TemporaryFile() as errors:
        code = train_recipe(start, errors=errors, received=received)
        errors.seek(0)
        return code, errors.read().decode(errors="replace").rstrip()
