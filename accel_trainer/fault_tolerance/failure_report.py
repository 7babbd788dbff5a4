"""How a run is doing, for others to read: `status.json`, and per process `logs/rank-NNNNN.json`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ..checkpoint.format import list_checkpoints
from ..core import filesystem
from ..core.activity import Activity
from ..core.errors import ExitCode, ProcessError, UserError
from ..core.guards import check_place
from ..core.run_dir import writes_to
from ..core.user_code import COLLECTIVES, describe_error, exit_code_of
from ..distributed.launch_env import count_local_processes
from .watchdog import Watchdog

_MAX_BYTES = 2**20
_PATIENCE_S = 8.0  # a stuck process reports a little after the timeout that the others met
# What a collective says when another process is gone or does not answer (torch 2.13).
_LOST_PEER = (*COLLECTIVES, "by peer", "timed out", "timeout")
_EXIT_CODES = {
    "done": ExitCode.DONE, "stopped": ExitCode.DONE, "preempted": ExitCode.PREEMPTED, "diverged": ExitCode.DIVERGED,
}  # fmt: skip
_STATES = {ExitCode.PREEMPTED: "preempted", ExitCode.DIVERGED: "diverged"}


@dataclass(frozen=True)
class Failure:
    """Why a process failed, and where it was then."""

    rank: int
    phase: str
    optimizer_step: int
    exit_code: int
    error: str
    time_s: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.optimizer_step}, {self.phase}: {self.error}"


@contextmanager
def failures_reported(
    folder: Path, activity: Activity, watchdog: Watchdog, *, rank: int, num_processes: int
) -> Iterator[None]:
    """Keep `status.json` while the block runs; on an error, name the process that failed first.

    Raises:
        ProcessError: another process failed first.
    """

    def describe(error: str, exit_code: int) -> Failure:
        return Failure(rank, activity.phase, activity.position.optimizer_step, int(exit_code), error)

    def write_status(state: str, exit_code: int | None = None, error: str | None = None) -> None:
        if rank > 0:
            return
        checkpoints = list_checkpoints(folder / "checkpoints")
        status = {
            "state": state, "exit_code": exit_code, "optimizer_step": activity.position.optimizer_step,
            "last_commit": checkpoints[-1].name if checkpoints else None, "error": error, "pid": os.getpid(),
            "host": platform.node(),
        }  # fmt: skip
        with writes_to(folder):
            filesystem.write_file_atomic(folder / "status.json", json.dumps(status, indent=1).encode())

    def report(failure: Failure) -> None:
        with suppress(OSError, UserError):  # the folder may be what failed: the error itself matters more
            _write_record(folder, rank, failure)
            write_status(_STATES.get(ExitCode(failure.exit_code), "failed"), failure.exit_code, str(failure))

    def on_stuck(stuck_s: float) -> str:
        failure = describe(f"stuck, no progress for {stuck_s:.0f} s", ExitCode.INTERNAL)
        report(failure)
        return f"error[STUCK]: {failure}"

    with writes_to(folder):
        with suppress(FileExistsError):  # another process of this machine was faster
            filesystem.make_directory(folder / "logs")
        _write_record(folder, rank, None)  # replaces that of an earlier launch
    watchdog.on_stuck = on_stuck
    write_status("running")
    try:
        yield
        write_status(activity.phase, _EXIT_CODES.get(activity.phase))
    except BaseException as error:
        mine = first = describe(describe_error(error), exit_code_of(error))
        activity.phase = "end"  # no longer watched
        is_unexpected = isinstance(error, Exception) and not isinstance(error, UserError)
        if is_unexpected and any(word in str(error).lower() for word in _LOST_PEER):
            check_place(folder)  # nobody finds there why the others ended
            first = _find_cause(folder, mine, [other for other in range(num_processes) if other != rank])
        report(first)
        if first is not mine:
            raise ProcessError("PROCESS", str(first), first.rank, first.exit_code) from error
        if is_unexpected:  # as `add_note` of Python 3.11 does: it is shown with a traceback
            vars(error).setdefault("__notes__", []).append(str(mine))
        raise


def _find_cause(folder: Path, mine: Failure, others: Sequence[int]) -> Failure:
    """Return the failure of another process that `mine` is the consequence of; `mine` if none is found."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        # Fates first: a process that is gone has reported before, if it could.
        fates = [replace(mine, rank=rank, error=fate) for rank in others if (fate := _fate(_read_record(folder, rank)))]
        reports = [_read_record(folder, rank).get("failure") for rank in others]
        if reported := [Failure(**report) for report in reports if report]:
            return min(reported, key=lambda failure: failure.time_s)
        if fates or time.monotonic() > deadline_s:
            return fates[0] if fates else _cut_off(folder, mine, others)
        time.sleep(0.1)


def _cut_off(folder: Path, mine: Failure, others: Sequence[int]) -> Failure:
    """Return a failure that names the processes of other machines, if a collective waited for them; else `mine`."""
    unknown = platform.node() if count_local_processes() > len(others) else "another machine"
    hosts = {rank: _read_record(folder, rank).get("host", unknown) for rank in others}
    away = [f"rank {rank} on {host}" for rank, host in hosts.items() if host != platform.node()]
    if not away or not any(library in mine.error.lower() for library in COLLECTIVES):
        return mine
    names = f"{', '.join(away[:4])}{' ...' * (len(away) > 4)}"
    return replace(mine, error=f"no answer from {names}: once machines and links are up, start the same command again")


def _fate(record: dict[str, Any]) -> str | None:
    """Return why a process does not answer; None: it runs, or it is on another machine."""
    if record.get("host") != platform.node():
        return None
    try:
        status = psutil.Process(record["pid"]).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return "gone without a word: killed from outside, out of memory (see `dmesg`), or aborted (its output says why)"
    if status == psutil.STATUS_STOPPED:
        return "suspended: it did not answer in time (a debugger, Ctrl-Z, SIGSTOP)"
    return None


def _record_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank-{rank:05d}.json"


def _write_record(folder: Path, rank: int, failure: Failure | None) -> None:
    record = {"pid": os.getpid(), "host": platform.node(), "failure": failure and asdict(failure)}
    filesystem.write_file_atomic(_record_path(folder, rank), json.dumps(record).encode())


def _read_record(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a process wrote; nothing, if it is on another machine's disk."""
    try:
        return dict(json.loads(filesystem.read_file(_record_path(folder, rank), max_bytes=_MAX_BYTES)))
    except (OSError, ValueError):
        return {}
