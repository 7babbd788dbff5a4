"""What is printed for people. A full disk behind stdout, or a reader that is gone, never ends a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_logger = logging.getLogger(__name__)


def say(text: str, *, write: Callable[[str], object] = print) -> None:
    """Print `text` on stdout. Once that fails nothing is printed any more, and the log says so."""
    try:
        write(text)
        flush()
    except (OSError, ValueError) as error:  # a ValueError: somebody has closed it
        _logger.warning("stdout takes no more (%s): nothing more is printed, training goes on", error)
        mute()


def flush() -> None:
    """Hand on what is printed. Raises OSError or ValueError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def mute() -> None:
    """Let stdout lead nowhere: otherwise what it still holds fails again when Python ends, with exit code 120."""
    with open(os.devnull, "w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):  # it is no file, such as in a notebook
            sys.stdout = None
    with suppress(OSError, ValueError):
        flush()
