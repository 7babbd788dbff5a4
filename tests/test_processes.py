"""Tests start real processes, and learn how each of them has ended."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import processes
from .processes import context


def _exit_code(_: int) -> int | None:
    process = context.Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def test_threads_that_start_processes_at_once_read_each_exit_code() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(_exit_code, range(40))} == {0}


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.skipif(sys.platform != "linux", reason="torch shows stacks of C++ on Linux alone")
def test_a_crash_shows_the_stack_of_each_thread_in_cpp(tmp_path: Path) -> None:
    job = processes.run(_crash, folder=tmp_path, codes=[-signal.SIGABRT])
    assert "libc10.so" in job.output()
