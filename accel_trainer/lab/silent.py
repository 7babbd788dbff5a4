"""What a recipe says while a command trains it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from accel_trainer import OutputError
from accel_trainer.commands import tell

T = TypeVar("T")


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
    """Return what `train` returns, and what a recipe has said that it started."""
    with TemporaryFile() as errors:
        return train(errors), read_said(errors)


def read_said(errors: IO[Any]) -> str:
    """Return what was written to the file."""
    errors.seek(0)
    return str(errors.read().decode(errors="replace").rstrip())
