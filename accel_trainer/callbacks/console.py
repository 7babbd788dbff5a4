"""Printing that never ends a run, even if stdout is on a full disk or its reader is gone."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable

# ASCII's and Latin-1's, those that change the direction of text, and halves of pairs, which cannot be printed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_logger = logging.getLogger(__name__)


def say(text: str, *, write: Callable[[str], object] = print) -> None:
    """Print `text` on stdout. Once that fails, print nothing more and log a warning."""
    try:
        write(text)
        flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed
        _logger.warning("cannot write to stdout (%s): nothing more is printed, training continues", error)
        mute()


def printable(text: str) -> str:
    """Return `text` with control characters, which a terminal would obey, as their escapes; lines stay lines."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def terminal_columns() -> int | None:
    """Return the width of the terminal on stdout, None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def fold(text: str, columns: int | None) -> str:
    """Return `text` with lines that are longer than `columns` continued below, indented.

    A word that is longer than a line, such as a path, is left whole: it can be copied.
    """
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.split("\n"))


def flush() -> None:
    """Flush stdout. Raises OSError or ValueError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def mute() -> None:
    """Redirect stdout to nowhere: what it still buffers would fail again when Python ends, with exit code 120."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
