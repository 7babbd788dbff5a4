from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from accel_trainer.core.platform import RUN_SIGNALS
from accel_trainer.data.signals import WorkerDeaths, ignore_signals

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="Windows has no SIGCHLD")


def handle_as_torch(number: int, frame: object) -> None:
    raise RuntimeError("DataLoader worker is killed")


handle_as_torch.__module__ = "torch.utils.data._utils"


@pytest.fixture(autouse=True)
def same_handler_of_deaths() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_the_death_of_a_data_worker_raises_only_while_data_is_waited_for() -> None:
    signal.signal(signal.SIGCHLD, handle_as_torch)
    deaths = WorkerDeaths()
    deaths.defer()
    os.kill(os.getpid(), signal.SIGCHLD)  # in a forward or a save: nothing is raised
    with pytest.raises(RuntimeError, match="worker is killed"), deaths.raised():
        raise AssertionError("a death before the wait is raised at its start")


def test_the_death_of_a_data_worker_raises_inside_the_wait_for_data() -> None:
    died = []

    def handle(number: int, frame: object) -> None:
        if died:
            raise RuntimeError("DataLoader worker is killed")

    handle.__module__ = "torch.utils.data._utils"
    signal.signal(signal.SIGCHLD, handle)
    deaths = WorkerDeaths()
    deaths.defer()

    def wait() -> None:
        with deaths.raised():
            died.append("worker")
            os.kill(os.getpid(), signal.SIGCHLD)
            raise AssertionError("the signal is handled before the next line")

    with pytest.raises(RuntimeError, match="worker is killed"):
        wait()


def test_a_handler_of_deaths_that_is_not_torchs_is_left_alone() -> None:
    own = signal.getsignal(signal.SIGCHLD)
    WorkerDeaths().defer()
    assert signal.getsignal(signal.SIGCHLD) is own


def test_a_process_that_is_done_ignores_the_signals_to_a_run() -> None:
    ignore_signals()
    assert {signal.getsignal(number) for number in RUN_SIGNALS} == {signal.SIG_IGN}
    for number in RUN_SIGNALS:
        os.kill(os.getpid(), number)
