from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_trainer.core import timing
from accel_trainer.core.timing import Stopwatch


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def test_a_wait_clock_counts_the_wait_and_not_the_work(clock: Clock) -> None:
    def items() -> Iterator[int]:
        for item in range(3):
            clock.now_s += 2
            yield item

    waited = Stopwatch()
    taken = []
    for item in waited.around(items()):
        clock.now_s += 10  # the work on an item
        taken.append(item)
    assert (taken, waited.seconds) == ([0, 1, 2], 6)


def test_a_wait_clock_goes_on_in_the_next_loop(clock: Clock) -> None:
    def one() -> Iterator[int]:
        clock.now_s += 1
        yield 0

    waited = Stopwatch()
    for _ in range(2):
        assert list(waited.around(one())) == [0]
    assert waited.seconds == 2


def test_a_stopwatch_adds_up_its_blocks_also_one_that_raises(clock: Clock) -> None:
    stopwatch = Stopwatch()

    def work(duration_s: float, *, fails: bool) -> None:
        with stopwatch.running():
            clock.now_s += duration_s
            if fails:
                raise KeyError

    work(3, fails=False)
    clock.now_s += 100
    with pytest.raises(KeyError):
        work(4, fails=True)
    assert stopwatch.seconds == 7
