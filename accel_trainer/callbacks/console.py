"""What a run says: in the words of who reads it, and without ever ending the run.

Not even if stdout is on a full disk or its reader is gone.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.logger import logger
from ..names.everyday import in_python


class _Words(logging.Filter):
    """Names settings as a Python program gives them, or by their flags, as all texts have them."""

    has_flags = False

    def of(self, text: str) -> str:
        return text if self.has_flags else in_python(text)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.of(record.getMessage()), ()
        return True


_words = _Words()
logger.addFilter(_words)


@contextmanager
def speaking_flags() -> Iterator[None]:
    """Let what is said inside keep its flags: a command line has started it."""
    before = _words.has_flags
    _words.has_flags = True
    try:
        yield
    finally:
        _words.has_flags = before


def say(text: str, *, write: Callable[[str], object] = print) -> None:
    """Print `text` on stdout. Once that fails, print nothing more and log a warning."""
    try:
        escape_letters()  # flushes what others have printed
        write(_words.of(text))
        flush()
    except (OSError, ValueError) as error:  # ValueError: stdout was closed
        logger.warning(
            "cannot write to stdout (%s): nothing more is printed, training continues", error
        )
        mute()


def escape_letters() -> None:
    """Let stdout print letters that its encoding lacks as escapes, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def terminal_columns() -> int | None:
    """Return the width of the terminal on stdout, None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None


def wrap_lines(text: str, columns: int | None) -> str:
    """Return `text` with lines that are longer than `columns` continued below, indented.

    A word that is longer than a line, such as a path, is left whole: it can be copied.
    """
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def flush() -> None:
    """Flush stdout. Raises OSError or ValueError."""
    if sys.stdout:
        sys.stdout.flush()


def mute() -> None:
    """Redirect stdout to nowhere.

    Else Python would fail again to write what stdout still buffers, and end with exit code 120.
    """
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
