"""Maps a function over items with threads: results in order, with a bounded read-ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...distributed.machine import available_cpus

S = TypeVar("S")
T = TypeVar("T")

_NUM_AHEAD = 128


def decoding_threads(wanted: int | None) -> ThreadPoolExecutor:
    """Return the threads of `--num-workers`: at least one, and by default one per CPU."""
    return ThreadPoolExecutor(max(1, available_cpus() if wanted is None else wanted))


def in_order(
    threads: ThreadPoolExecutor, function: Callable[[S], T], items: Iterable[S]
) -> Iterator[T]:
    """Yield `function(item)` for each item, in order.

    An error in `function` is raised when the result of its item is due.
    """
    waiting: deque[Future[T]] = deque()
    try:
        for item in items:
            waiting.append(threads.submit(function, item))
            if len(waiting) >= _NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
