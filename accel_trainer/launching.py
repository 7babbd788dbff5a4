"""Several processes from one plain script or notebook, without a launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from .accelerate_settings import forget_earlier_accelerators
from .errors import ConfigError, ExitCode, ProcessError, UserError
from .launcher_variables import setup_launch_env
from .runtime import uses_cpu

_logger = logging.getLogger(__name__)

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
    if wanted == 1 or setup_launch_env() > 1:
        return function(*arguments)
    try:
        _check_can_fork(wanted)
        # From a thread that has computed nothing. A process forked from one that has used OpenMP, as most
        # operations of torch do, hangs in its first operation on several threads (libgomp, torch 2.13).
        # It lives as long as they do: torch ends a process with the thread that started it.
        with ThreadPoolExecutor(1) as fresh_thread:
            processes, pipes = fresh_thread.submit(_start, function, arguments, wanted).result()
            outcomes = fresh_thread.submit(_receive, pipes)
            failure = _join(processes)
            return _find_result(outcomes.result(), failure)  # type: ignore[no-any-return]
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
        fact = "CUDA is in use in this process, and no other can be forked from it"
        fix = "restart it (in a notebook, the kernel) and call launch before anything touches a GPU"
        raise ConfigError("LAUNCH", f"{fact}: {fix}")
    if num_processes > (num_gpus := torch.cuda.device_count()):
        fact = f"num_processes is {num_processes}, and there are {num_gpus} GPUs"
        raise ConfigError("LAUNCH", f"{fact}: set it to at most that, or ACCELERATE_USE_CPU=true to use the CPU")


def _start(
    function: Callable[..., Any], arguments: Sequence[Any], num_processes: int
) -> tuple[ProcessContext, list[Connection]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "ACCEL_TRAINER_LAUNCHER": "launch"}
    shared |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(num_processes)]
    senders = [sender for _, sender in pipes]
    logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)  # whom it ends after a failure is no news
    arguments = (function, arguments, shared, senders)
    processes = start_processes(_run, arguments, nprocs=num_processes, join=False, start_method="fork")
    for sender in senders:
        sender.close()  # so that a pipe ends with its process
    return processes, [receiver for receiver, _ in pipes]


def _run(
    rank: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    shared: Mapping[str, str],
    pipes: Sequence[Connection],
) -> None:
    """Be process `rank`, and send what comes of it: an error, and the main process's result."""
    # torch sends SIGINT when the launcher dies, as often as it has threads, and a second one leaves without a save.
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    forget_earlier_accelerators()  # of a run in the process that forked this one
    code = 0
    try:
        result = function(*arguments)
        pipes[rank].send((None, None if rank else result))
    except UserError as error:
        pipes[rank].send((error, None))
        code = int(error.exit_code)
    except SystemExit as error:  # of a recipe's `main`, which has said why
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        traceback.print_exception(error)
        code = int(ExitCode.INTERNAL)
        pipes[rank].send((ProcessError("PROCESS", f"rank {rank}: {type(error).__name__}: {error}", rank, code), None))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what was forked along is not this process's to tidy up


def _receive(pipes: Sequence[Connection]) -> dict[int, tuple[UserError | None, Any]]:
    outcomes: dict[int, tuple[UserError | None, Any]] = {}
    for rank, pipe in enumerate(pipes):
        with suppress(EOFError):
            outcomes[rank] = pipe.recv()
    return outcomes


def _join(processes: ProcessContext) -> ProcessExitedException | None:
    """Wait until all have ended, and return the failure of the one that failed first, upon which the others end."""
    while True:
        try:
            if processes.join():
                return None
        except KeyboardInterrupt:
            for process in processes.processes:
                process.terminate()
        except ProcessExitedException as failure:
            return failure


def _find_result(outcomes: Mapping[int, tuple[UserError | None, Any]], failure: ProcessExitedException | None) -> Any:
    """Return the main process's result; or raise the error of the process that failed first."""
    if failure is None:
        return outcomes[0][1] if 0 in outcomes else None
    # One that was killed said nothing: others may know more.
    for rank in sorted(outcomes, key=lambda rank: rank != failure.error_index):
        if (error := outcomes[rank][0]) is not None:
            raise error
    how = f"was killed by {failure.signal_name}" if failure.signal_name else f"left with exit code {failure.exit_code}"
    rank = failure.error_index
    raise ProcessError("KILLED", f"rank {rank} {how}", rank, ExitCode.INTERNAL)
