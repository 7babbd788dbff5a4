"""Ends what a test run has started, when it is over or was killed.

A launcher that is interrupted takes minutes to give up its processes, and one that is killed leaves
them for good.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from contextlib import suppress

import psutil

_MARK = "ACCEL_TRAINER_TEST_RUN"  # in the environment of all that this process starts


def start() -> None:
    """Start a process that outlives this one, to end all that this one will have started."""
    os.environ[_MARK] = uuid.uuid4().hex
    if not hasattr(os, "posix_spawn"):  # Windows, where few tests run and none leaves a process
        return
    os.posix_spawn(
        sys.executable, [sys.executable, __file__, str(os.getpid())], os.environ, setsid=True
    )


def find_started() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
    return found


def main() -> None:
    test_run = int(sys.argv[1])
    while os.getppid() == test_run:
        time.sleep(0.2)
    while started := find_started():
        for process in started:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(started, timeout=5)


if __name__ == "__main__":
    main()
