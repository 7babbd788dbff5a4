"""Records how a run is doing: `status.json`, and for each process `logs/rank-NNNNN.json`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

from ..checkpoint.format import list_checkpoints
from ..checkpoint.loading import has_checkpoints
from ..core import filesystem
from ..core.errors import ExitCode, OneLineError, PeerFailed, Preempted, ProcessError, UserError
from ..core.filesystem import writes_to
from ..core.guards import check_not_moved
from ..core.json_files import read_json_object, write_json
from ..core.logger import logger
from ..core.user_code import describe_error, exit_code_of, is_lost_peer
from ..distributed.launch_env import count_local_processes
from .activity import Activity
from .watchdog import Watchdog

# 8 s: a stuck process reports its failure a little after the others have met the timeout.
_NUM_LOOKS = 80
_LOOK_INTERVAL_S = 0.1
_EXIT_CODES = {"preempted": ExitCode.PREEMPTED, "diverged": ExitCode.DIVERGED}
_STATES = {code: state for state, code in _EXIT_CODES.items()}
_EXITED = "exited without an error report: killed, or out of memory (see `dmesg`)"
_SUSPENDED = "suspended: it did not answer in time (a debugger, Ctrl-Z, SIGSTOP)"
_NO_ANSWER = (
    "no answer from another machine: once machines and links are up, start the same command again"
)
_REASONS = {psutil.STATUS_ZOMBIE: _EXITED, psutil.STATUS_STOPPED: _SUSPENDED}


@dataclass(frozen=True)
class Failure:
    """Why and where a process failed."""

    rank: int
    where: str
    error: str
    exit_code: int
    time_s: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.where}: {self.error}"


@contextmanager
def failures_reported(
    folder: Path, activity: Activity, watchdog: Watchdog, *, rank: int, num_processes: int
) -> Iterator[None]:
    """Keep `status.json` while the block runs; on an error, name the process that failed first.

    Raises:
        ProcessError: another process failed first; Preempted if a signal ended it. Or the block
            exits with 0 and the run has not ended, since it would look as if it had.
    """
    report = _Report(folder, activity, rank)
    status_path = folder / "status.json"
    before = _read_record(status_path)
    checkpoints = folder / "checkpoints"
    saved = before.get("last_commit")
    # A run that was killed in its first attempt has not recorded what it saved, but has the folder.
    is_gone = (folder / "attempts.jsonl").exists() and not checkpoints.exists()
    if (saved or is_gone) and not has_checkpoints(checkpoints):
        logger.warning(
            "%s, which an earlier start wrote, is gone, so the run begins again without it: to "
            "continue from it, stop this start and restore it",
            f"{checkpoints}/{saved or ''}",
        )
    with writes_to(folder), suppress(FileExistsError):  # another process has just made it
        filesystem.make_directory(folder / "logs")
    report.write("running")  # replaces the record of an earlier attempt
    watchdog.on_stuck = report.write_stuck
    try:
        yield
        report.write(activity.phase, _EXIT_CODES.get(activity.phase, ExitCode.DONE))
    except BaseException as error:
        if isinstance(error, SystemExit) and activity.phase in ("done", "stopped"):
            report.write(activity.phase, ExitCode.DONE)
            raise
        mine = first = report.failure(describe_error(error), exit_code_of(error))
        was_starting = activity.phase == "start"
        activity.phase = "end"  # no longer watched
        if is_lost_peer(error):
            check_not_moved(folder)  # in another folder are no records of the other processes
            first = _find_first(folder, mine, num_processes)
            if (
                first is mine
                and count_local_processes() < num_processes
                and not isinstance(error, PeerFailed)
            ):
                first = replace(mine, error=_NO_ANSWER, exit_code=ExitCode.INTERNAL)
        report.write_failure(first)
        if rank == 0 and was_starting and before.get("exit_code") == ExitCode.DONE:
            with suppress(OSError):  # a finished run stays finished, whatever start it refuses
                write_json(status_path, before)
        if first is not mine or (isinstance(error, SystemExit) and not error.code):
            if first.exit_code == ExitCode.PREEMPTED:
                raise Preempted("PREEMPTED", str(first)) from error
            raise ProcessError("PROCESS", str(first), first.rank, first.exit_code) from error
        if not isinstance(error, OneLineError):
            # A traceback shows it. Python 3.11 has `add_note` for this.
            vars(error).setdefault("__notes__", []).append(str(mine))
        raise


@dataclass(frozen=True)
class _Report:
    """What process `rank` writes for others to read."""

    folder: Path
    activity: Activity
    rank: int

    def failure(self, error: str, exit_code: int) -> Failure:
        where = f"step {self.activity.state.optimizer_step}, {self.activity.phase}"
        return Failure(self.rank, where, error, exit_code)

    def write(
        self, state: str, exit_code: int | None = None, failure: Failure | None = None
    ) -> None:
        process = {"pid": os.getpid(), "host": platform.node()}
        with writes_to(self.folder):
            write_json(
                _record_path(self.folder, self.rank),
                {**process, "failure": failure and asdict(failure)},
            )
            if self.rank > 0:
                return
            checkpoints = list_checkpoints(self.folder / "checkpoints")
            status = {
                "state": state,
                "exit_code": exit_code,
                "optimizer_step": self.activity.state.optimizer_step,
                "last_commit": checkpoints[-1].name if checkpoints else None,
                "error": failure and str(failure),
            }
            write_json(self.folder / "status.json", status | process)

    def write_failure(self, failure: Failure) -> None:
        state = _STATES.get(ExitCode(failure.exit_code), "failed")
        # The folder may be what failed, and the error itself matters more.
        with suppress(OSError, UserError):
            self.write(state, failure.exit_code, failure)

    def write_stuck(self, stuck_s: float) -> str:
        failure = self.failure(f"stuck, no progress for {stuck_s:.0f} s", ExitCode.INTERNAL)
        self.write_failure(failure)
        return f"error[STUCK]: {failure}"


def _find_first(folder: Path, mine: Failure, num_processes: int) -> Failure:
    """Return the failure of another process that caused `mine`; `mine` if none is found."""
    silent: Failure | None = None
    for _ in range(_NUM_LOOKS):
        records = [_read_record(_record_path(folder, rank)) for rank in range(num_processes)]
        if failures := [record["failure"] for record in records if record.get("failure")]:
            return Failure(**min(failures, key=itemgetter("time_s")))
        # This process was gone before the records were read again: it reports nothing more.
        if silent is not None:
            return silent
        for rank, reason in enumerate(map(_find_reason, records)):
            if reason is not None:
                # Not the code of `mine`: the user's code may have called the collective.
                found = replace(mine, rank=rank, error=reason, exit_code=ExitCode.INTERNAL)
                silent = silent or found
        time.sleep(_LOOK_INTERVAL_S)
    return mine


def _find_reason(record: dict[str, Any]) -> str | None:
    """Return why a process does not answer; None if it runs or is on another machine."""
    if record.get("host") != platform.node():
        return None
    try:
        return _REASONS.get(psutil.Process(record["pid"]).status())
    except psutil.NoSuchProcess:
        return _EXITED


def _record_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank-{rank:05d}.json"


def _read_record(path: Path) -> dict[str, Any]:
    """Return what a process has written; empty if it is missing, or on another machine's disk."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}
