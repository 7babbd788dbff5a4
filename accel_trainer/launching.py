"""Several processes from one plain script or notebook, without a launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.elastic.utils.distributed import get_free_port

from .errors import ConfigError, ExitCode, ProcessError, UserError
from .launcher_variables import find_processes
from .runtime import uses_cpu

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

_logger = logging.getLogger(__name__)
_GRACE_S = 30.0  # for the others to end in good order, once one has failed

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    *arguments: Any,
    num_processes: int | None = None,
    on_failure: Literal["error", "single"] = "error",
) -> T:
    """Run `function(*arguments)` in each of `num_processes` on this machine; return what it returns in the main one.

    None is one process per GPU, or one without a GPU. One process is this one. Several are forked from it, so that
    functions and arguments may be anything, also of a notebook; what comes back is pickled. Below another
    launcher, such as torchrun, the processes are there already, and `function` runs in this one.

    With `on_failure="single"`, if the processes cannot be started or one is lost, that is said and `function` runs
    here, in one. With Ctrl-C all stop in good order.

    Raises:
        ConfigError: CUDA is in use in this process, or there are fewer GPUs.
        UserError: what a process raised; `ProcessError` for a bug in it, or if it was killed.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError("LAUNCH", f"num_processes is {num_processes}: set it to 1 or more, or None")
    wanted = num_processes or (1 if uses_cpu() else max(1, torch.cuda.device_count()))
    if wanted == 1 or find_processes() > 1:
        return function(*arguments)
    try:
        _check_can_fork(wanted)
        # From a thread that has computed nothing. A process forked from one that has used OpenMP, as most
        # operations of torch do, hangs in its first operation on several threads (libgomp, torch 2.13).
        with ThreadPoolExecutor(1) as fresh_thread:
            processes = fresh_thread.submit(_start, function, arguments, wanted).result()
        return _collect(processes)  # type: ignore[no-any-return]
    except UserError as error:
        if on_failure == "error" or not (isinstance(error, ProcessError) or error.code == "LAUNCH"):
            raise
        _logger.warning("%s. GOING ON WITH ONE PROCESS, as on_failure='single' asks", error)
    return function(*arguments)


def _check_can_fork(num_processes: int) -> None:
    if not hasattr(os, "fork"):
        raise ConfigError("LAUNCH", f"num_processes is {num_processes}, and Windows forks no process: set it to 1")
    if uses_cpu():
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            "LAUNCH",
            "CUDA is in use in this process, and no other can be forked from it: restart it (in a notebook, the "
            "kernel) and call launch before anything touches a GPU",
        )
    if num_processes > torch.cuda.device_count():
        raise ConfigError(
            "LAUNCH",
            f"num_processes is {num_processes}, and there are {torch.cuda.device_count()} GPUs: set it to at most "
            "that, or ACCELERATE_USE_CPU=true to use the CPU",
        )


@dataclass(frozen=True)
class _Process:
    """One of the processes, and the pipe that its outcome comes through."""

    rank: int
    process: ForkProcess
    outcomes: Connection

    def outcome(self) -> tuple[UserError | None, Any]:
        """Return what it raised and what it returned, once it has ended."""
        outcome: tuple[UserError | None, Any] = None, None
        with suppress(EOFError):
            outcome = self.outcomes.recv()
        self.process.join()
        if code := self.process.exitcode:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            outcome = ProcessError("KILLED", f"rank {self.rank} {how}", self.rank, ExitCode.INTERNAL), None
        return outcome


def _start(function: Callable[..., Any], arguments: Sequence[Any], num_processes: int) -> list[_Process]:
    context = multiprocessing.get_context("fork")
    shared = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "ACCEL_TRAINER_LAUNCHER": str(os.getpid()),
    }
    started = []
    for rank in range(num_processes):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        outcomes, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(function, arguments, environment, sender))
        process.start()
        sender.close()  # so that the pipe ends with the process
        started.append(_Process(rank, process, outcomes))
    return started


def _run(
    function: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str], outcome: Connection
) -> None:
    """Be one of the processes."""
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run in the process that forked this one
    GradientState._reset_state()
    rank, code = int(environment["RANK"]), 0
    try:
        result = function(*arguments)
        outcome.send((None, result if rank == 0 else None))
    except UserError as error:
        outcome.send((error, None))
    except Exception as error:
        traceback.print_exception(error)
        message = f"rank {rank}: {type(error).__name__}: {error}"
        outcome.send((ProcessError("PROCESS", message, rank, ExitCode.INTERNAL), None))
    except SystemExit as error:  # of a recipe's `main`, which has said why
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what was forked along is not this process's to tidy up


def _collect(processes: Sequence[_Process]) -> Any:
    """Return the outcome of the first, once all have ended; or raise the first error that one of them told."""
    waiting = {process.outcomes: process for process in processes}
    results: dict[int, Any] = {}
    errors: list[UserError] = []

    def end_others() -> None:
        for other in waiting.values():
            other.process.terminate()

    while waiting:
        try:
            ready = wait(list(waiting), _GRACE_S if errors else None)
        except KeyboardInterrupt:
            end_others()
            continue
        if not ready:
            for process in waiting.values():
                process.process.kill()
        for process in [waiting.pop(pipe) for pipe in list(waiting) if pipe in ready]:
            error, results[process.rank] = process.outcome()
            if error is not None:
                errors.append(error)
                end_others()
    if errors:
        raise min(errors, key=lambda error: error.code == "KILLED")  # it told nothing: others may know more
    return results[0]
