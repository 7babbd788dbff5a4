"""Printing that never ends a run, even if stdout is on a full disk or its reader is gone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_logger = logging.getLogger(__name__)


def say(text: str, *, write: Callable[[str], object] = print) -> None:
    """Print `text` on stdout. Once that fails, print nothing more and log a warning."""
    try:
        write(text)
        flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed
        _logger.warning("stdout takes no more (%s): nothing more is printed, training continues", error)
        mute()


def flush() -> None:
    """Flush stdout. Raises OSError or ValueError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def mute() -> None:
    """Redirect stdout to nowhere, or what it still buffers fails again when Python ends, with exit code 120."""
    with open(os.devnull, "w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):  # not a file, such as in a notebook
            sys.stdout = None
    with suppress(OSError, ValueError):
        flush()
