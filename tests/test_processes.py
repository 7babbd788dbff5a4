"""Tests start real processes, and learn how each of them has ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .processes import context


def _exit_code(_: int) -> int | None:
    process = context.Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def test_threads_that_start_processes_at_once_read_each_exit_code() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(_exit_code, range(40))} == {0}
