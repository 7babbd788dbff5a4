"""However a test run ends, no process that it started keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil

from . import processes, reaper


def test_a_test_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    processes.run(start_and_die, tmp_path / "pids", folder=tmp_path, codes=[-signal.SIGKILL])
    for pid in (tmp_path / "pids").read_text().split():
        try:
            psutil.Process(int(pid)).wait()
        except psutil.NoSuchProcess:
            continue


def start_and_die(pids: Path) -> None:
    reaper.start()
    orphan = 'sleep 3600 & echo $! >> "$0"; echo $$ >> "$0"; trap "" INT TERM HUP; wait'
    subprocess.Popen(["sh", "-c", orphan, str(pids)], start_new_session=True)
    while not (pids.exists() and pids.read_text().count("\n") == 2):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
