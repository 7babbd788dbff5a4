"""How a run is doing, for others to read: `status.json`, and one line with the first error when it fails."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import storage
from .checkpoint_files import list_checkpoints
from .errors import ExitCode, ProcessError, UserError
from .failures import Failure, FailureReports
from .run_folder import writes_to
from .watchdog import Watchdog

# What a collective says when another process is gone or does not answer (torch 2.6 to 2.13).
_SAID_OF_PEERS = ("gloo", "nccl", "by peer", "timed out", "timeout")
_EXIT_CODES = {"done": ExitCode.DONE, "stopped": ExitCode.DONE, "preempted": ExitCode.PREEMPTED}
_STATES = {ExitCode.PREEMPTED: "preempted", ExitCode.DIVERGED: "diverged"}


@contextmanager
def reported(folder: Path, watchdog: Watchdog, *, rank: int, num_processes: int) -> Iterator[None]:
    """Say in `status.json` that the block runs and how it ends; on an error, find the process that failed first.

    Raises:
        ProcessError: when another process failed first, naming it.
    """
    with writes_to(folder):
        reports = FailureReports(folder / "logs", rank=rank, num_processes=num_processes)

    def describe(error: str, exit_code: int) -> Failure:
        return Failure(rank, watchdog.phase, watchdog.position.optimizer_step, int(exit_code), error, time.time())

    def write(state: str, exit_code: int | None = None, error: str | None = None) -> None:
        if rank == 0:
            _write_status(folder, state, exit_code, error, watchdog.position.optimizer_step)

    def on_stuck(stuck_s: float, stacks: str) -> str:
        failure = describe(f"stuck, no progress for {stuck_s:.0f} s", ExitCode.INTERNAL)
        reports.report(failure, stacks)
        write("failed", failure.exit_code, str(failure))
        return f"error[STUCK]: {failure}: see {reports.log(rank)}"

    watchdog.on_stuck = on_stuck
    write("running")
    try:
        yield
        write(watchdog.phase, _EXIT_CODES.get(watchdog.phase))
    except BaseException as error:
        is_users = isinstance(error, UserError)
        said = str(error.args[0]) if is_users else f"{type(error).__name__}: {error}"
        mine = describe(said, error.exit_code if isinstance(error, UserError) else ExitCode.INTERNAL)
        watchdog.phase = "end"  # finding out is no longer watched
        is_bug = isinstance(error, Exception) and not is_users
        cause = str(error).lower()
        lost_peer = is_bug and num_processes > 1 and any(word in cause for word in _SAID_OF_PEERS)
        # A process that is stuck says so a little after the timeout that the others met.
        patience_s = 0.0 if not lost_peer else 8.0 if "time" in cause else 2.0
        first = reports.find_first(mine, lost_peer=lost_peer, patience_s=patience_s)
        if first.error == mine.error:  # all processes found it, in the same step
            first = mine
        with suppress(OSError, UserError):  # the folder may be what failed: that error is the one to report
            reports.report(first, traceback.format_exc())
            write(_STATES.get(ExitCode(first.exit_code), "failed"), first.exit_code, str(first))
        if first is not mine:
            message = f"{first}: see {reports.log(first.rank)}"
            raise ProcessError("PROCESS", message, first.rank, first.exit_code) from error
        if is_bug:
            # As `add_note` of Python 3.11 does: it is shown with a traceback.
            vars(error).setdefault("__notes__", []).append(f"{mine}: see {reports.log(rank)}")
        raise


def _write_status(folder: Path, state: str, exit_code: int | None, error: str | None, optimizer_step: int) -> None:
    checkpoints = list_checkpoints(folder / "checkpoints")
    status = {
        "state": state,
        "exit_code": exit_code,
        "optimizer_step": optimizer_step,
        "last_commit": checkpoints[-1].name if checkpoints else None,
        "error": error,
        "pid": os.getpid(),
        "host": platform.node(),
    }
    with writes_to(folder):
        storage.write_file_atomic(folder / "status.json", json.dumps(status, indent=1).encode())
