"""Clocks for the time spent waiting for items, and for one-time work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class WaitClock:
    """Measures how long the host has waited for items, in `seconds`."""

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


class Stopwatch:
    """Counts the `seconds` of one-time work, which the throughput does not include."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start_s
