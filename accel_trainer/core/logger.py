"""The logger of all modules: what it says is worded by `callbacks.console`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# One, as the filter of a parent is not asked for what its children log.
logger = logging.getLogger("accel_trainer")


@contextmanager
def main_speaks(is_main: bool) -> Iterator[None]:
    """Let the main process alone warn in the block: the others would only repeat it."""
    before = logger.level
    if not is_main:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
