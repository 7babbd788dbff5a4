"""The time spent waiting for items, or on one-time work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def is_long_wait(wait_s: float, spent_s: float, num_steps: int) -> bool:
    """Return whether so many steps wait for samples long enough for more data workers to help."""
    # Workers take less than 10 ms to send a batch.
    return wait_s > max(0.3 * spent_s, 0.01 * num_steps)


class Stopwatch:
    """Adds up the `seconds` that were spent on something."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items` and add up the time that each takes to arrive."""
        clock = time.perf_counter
        start_s = clock()
        for item in items:
            self.seconds += clock() - start_s
            yield item
            start_s = clock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start_s
