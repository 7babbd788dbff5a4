"""What a recipe says while a command trains it, and how it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from accel_trainer import ExitCode, OutputError
from accel_trainer.commands import tell

T = TypeVar("T")


class RecipeError(OutputError):
    """A recipe failed when it was trained; `exit_code` is what it `ended_with`, if it is ours."""

    def __init__(self, code: str, message: str, ended_with: int) -> None:
        super().__init__(code, message)
        if ended_with in [*ExitCode]:  # not by a signal, or by another program
            self.exit_code = ExitCode(ended_with)


@contextmanager
def told_if_it_fails() -> Iterator[IO[Any]]:
    """Yield a file for what a recipe says; an OutputError in the block prints it on stderr."""
    with TemporaryFile() as errors:
        try:
            yield errors
        except OutputError:
            tell(read_said(errors), file=sys.stderr)
            raise


def caught(train: Callable[[IO[Any]], T]) -> tuple[T, str]:
    """Return what `train` returns, and what the recipe that it started has printed."""
    with TemporaryFile() as errors:
        return train(errors), read_said(errors)


def read_said(errors: IO[Any]) -> str:
    """Return what was written to the file."""
    errors.seek(0)
    return str(errors.read().decode(errors="replace").rstrip())
