"""Who failed first: each process of a launch leaves a record in the run folder that the others read."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from . import storage

_MAX_BYTES = 2**20


@dataclass(frozen=True)
class Failure:
    """Why a process failed, and where it was then."""

    rank: int
    phase: str
    optimizer_step: int
    exit_code: int
    error: str
    time_s: float

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.optimizer_step}, {self.phase}: {self.error}"


class FailureReports:
    """The processes of a launch as they see each other: `rank-NNNNN.json`, and stacks in `rank-NNNNN.log`."""

    def __init__(self, folder: Path, *, rank: int, num_processes: int) -> None:
        self._folder, self._rank = folder, rank
        self._others = [other for other in range(num_processes) if other != rank]
        with suppress(FileExistsError):  # another process of this machine was faster
            storage.make_directory(folder)
        self._write(None)  # forget an earlier launch

    def log(self, rank: int) -> Path:
        """Return where the stacks of a process go."""
        return self._folder / f"rank-{rank:05d}.log"

    def report(self, failure: Failure, stacks: str) -> None:
        """Record why this process fails. A full disk must not hide the error itself."""
        with suppress(OSError):
            self._write(failure)
            log = storage.AppendFile(self.log(self._rank))
            log.append(f"{failure}\n{stacks}\n".encode())
            log.close()

    def find_first(self, mine: Failure, *, lost_peer: bool, patience_s: float = 0.0) -> Failure:
        """Return the earliest failure that has been reported; with `lost_peer`, of which `mine` is the consequence.

        Its report may come late, and a process that was killed leaves none.
        """
        deadline_s = time.monotonic() + patience_s
        while not (found := [Failure(**record["failure"]) for record in self._records() if record.get("failure")]):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(0.1)
        if lost_peer and not found:
            fates = {rank: _fate(record) for rank, record in zip(self._others, self._records(), strict=True)}
            found = [replace(mine, rank=rank, error=fate) for rank, fate in fates.items() if fate]
        candidates = found if lost_peer and found else [mine, *found]
        return min(candidates, key=lambda failure: failure.time_s)

    def _write(self, failure: Failure | None) -> None:
        mine = {"pid": os.getpid(), "host": platform.node(), "failure": failure and asdict(failure)}
        storage.write_file_atomic(self.log(self._rank).with_suffix(".json"), json.dumps(mine).encode())

    def _records(self) -> list[dict[str, Any]]:
        """Return what the others wrote; of those on another machine's disk, nothing."""
        records: list[dict[str, Any]] = []
        for rank in self._others:
            records.append({})
            with suppress(OSError, ValueError):
                path = self.log(rank).with_suffix(".json")
                records[-1] = dict(json.loads(storage.read_file(path, max_bytes=_MAX_BYTES)))
        return records


def _fate(record: dict[str, Any]) -> str | None:
    """Return what can be seen from here of a process that does not answer; None: it runs, or is elsewhere."""
    if record.get("host") != platform.node():
        return None
    try:
        is_suspended = psutil.Process(record["pid"]).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return "gone without a word: killed from outside, or it ran out of memory (see `dmesg`)"
    return "suspended: it did not answer in time (a debugger, Ctrl-Z, SIGSTOP)" if is_suspended else None
