"""Starts several processes from a plain script or notebook, without a launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]  # not in __all__
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from ..core.errors import ConfigError, ExitCode, OneLineError, Preempted, ProcessError
from ..core.user_code import describe_error, exit_code_of, print_error
from .accelerate_settings import reset_accelerate
from .accelerator import uses_cpu
from .determinism import prepare_cuda
from .launch_env import setup_launch_env

T = TypeVar("T")


def launch(function: Callable[..., T], *arguments: Any, num_processes: int | None = None) -> T:
    """Run `function(*arguments)` in `num_processes` processes; return the main one's result.

    None: one process per GPU, or one process without a GPU. One process runs in the caller. Several
    are forked from it on this machine: the function and its arguments may be anything, also from a
    notebook; the result is pickled. Windows cannot fork and spawns them: there the function must be
    in a module. Under a launcher such as torchrun the processes exist already, and `function` runs
    in the caller. Ctrl-C stops all processes cleanly.

    Raises:
        ConfigError: CUDA is in use in this process, there are fewer GPUs than processes, or the
            function cannot be pickled for a spawned process.
        OneLineError: raised by a process; `ProcessError` for any other error in it, or if it was
            killed.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(
            "LAUNCH", f"num_processes is {num_processes}: set it to 1 or more, or None"
        )
    prepare_cuda()
    wanted = num_processes or (1 if uses_cpu() else max(1, torch.cuda.device_count()))
    action = partial(function, *arguments)
    if wanted == 1 or setup_launch_env() > 1:
        return _outcome(action)  # type: ignore[no-any-return]  # it is a T
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    _check_can_start(action, wanted, method)
    # Fork from a new thread. A process forked from a thread that has used OpenMP, as most of torch
    # does, hangs in its first multithreaded operation (libgomp, torch 2.13). The thread must
    # outlive the processes, since torch ends them with the thread that started them.
    with ThreadPoolExecutor(1) as fresh_thread:
        processes, pipes = fresh_thread.submit(_start, action, wanted, method).result()
        outcomes = fresh_thread.submit(_receive, pipes)
        failure = _join(processes)
        return _find_result(outcomes.result(), failure)  # type: ignore[no-any-return]  # it is a T


def _check_can_start(action: partial[Any], num_processes: int, method: str) -> None:
    if method != "fork":
        _check_can_pickle(action)
    if uses_cpu():
        return
    if method == "fork" and torch.cuda.is_initialized():
        raise ConfigError(
            "LAUNCH",
            "CUDA is in use in this process, which cannot be forked: restart it, and launch first",
        )
    num_gpus = torch.cuda.device_count()
    if num_processes > num_gpus:
        raise ConfigError(
            "LAUNCH",
            f"num_processes is {num_processes}, and there are {num_gpus} GPUs: "
            "set it to at most that, or ACCELERATE_USE_CPU=true to use the CPU",
        )


def _check_can_pickle(action: partial[Any]) -> None:
    """Raise ConfigError if a spawned process cannot import the function by its name."""
    try:
        ForkingPickler.dumps(action)
        if action.func.__module__ != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
            return
        fact = "a notebook's functions are in no file"
    except Exception as error:  # pickle raises many kinds
        fact = str(error)
    raise ConfigError("LAUNCH", f"Windows cannot fork, and {fact}: move the function to a module")


def _start(
    action: Callable[[], Any], num_processes: int, method: str
) -> tuple[ProcessContext, list[Connection]]:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "ACCEL_TRAINER_LAUNCHER": "launch",
    }
    if uses_cpu():
        # Otherwise a plain `Accelerator()` in each process would not join the others.
        shared["ACCELERATE_USE_CPU"] = "true"
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(num_processes)]
    senders = [sender for _, sender in pipes]
    # Without its warnings about the processes that it ends after a failure.
    logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)
    processes = start_processes(
        _run, (action, shared, senders), nprocs=num_processes, join=False, start_method=method
    )
    for sender in senders:
        sender.close()  # so that a pipe ends when its process does
    return processes, [receiver for receiver, _ in pipes]


def _run(
    rank: int, action: Callable[[], Any], shared: Mapping[str, str], pipes: Sequence[Connection]
) -> None:
    """Run `action` as process `rank`, and send its error or the main process's result."""
    # If the parent dies, torch would send SIGINT once per thread: the second one exits without a
    # save.
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    reset_accelerate()  # those of the parent
    code = 0
    try:
        result = _outcome(action)
        # `send` would pass tensors as handles to shared memory, which ends with this process.
        pipes[rank].send_bytes(pickle.dumps(None if rank else result))
    except (Exception, Preempted) as error:
        code = int(exit_code_of(error))
        if not isinstance(error, OneLineError):
            print_error(error)
            error = ProcessError("PROCESS", f"rank {rank}: {describe_error(error)}", rank, code)
        pipes[rank].send(error)
    except SystemExit as error:  # from a recipe's `main`, which has printed the reason
        code = error.code if isinstance(error.code, int) else 1
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed
        stream.flush()
    os._exit(code)  # without the exit handlers, which belong to the parent


def _outcome(action: Callable[[], Any]) -> Any:
    """Return what `action` returns, or the result of the run that a signal stopped in it."""
    try:
        return action()
    except Preempted as stop:
        if stop.result is None:
            raise
        return stop.result


def _receive(pipes: Sequence[Connection]) -> dict[int, Any]:
    """Return the error or result that each process sent, by rank."""
    outcomes = {}
    for rank, pipe in enumerate(pipes):
        with suppress(EOFError):  # the process was killed
            outcomes[rank] = pipe.recv()
    return outcomes


def _join(processes: ProcessContext) -> ProcessExitedException | None:
    """Wait until all processes have ended, and return the first failure, which ends the others."""
    while True:
        try:
            if processes.join():
                return None
        except KeyboardInterrupt:
            for process in processes.processes:
                process.terminate()
        except ProcessExitedException as failure:
            return failure


def _find_result(outcomes: Mapping[int, Any], failure: ProcessExitedException | None) -> Any:
    """Return the main process's result, or raise the error of the process that failed first."""
    if failure is None:
        return outcomes.get(0)
    # A process that was killed has sent nothing, but another may have sent an error.
    rank = failure.error_index
    for outcome in (outcomes.get(rank), *outcomes.values()):
        if isinstance(outcome, OneLineError):
            raise outcome
    raise ProcessError("KILLED", str(failure), rank, ExitCode.INTERNAL)
