"""Several processes from one plain script or notebook, without a launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
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

from ..core.errors import ConfigError, ExitCode, ProcessError, UserError
from ..core.user_code import describe_error, exit_code_of, print_error
from .accelerate_settings import forget_earlier_accelerators
from .accelerator import uses_cpu
from .determinism import prepare_cuda
from .launch_env import setup_launch_env

T = TypeVar("T")


def launch(function: Callable[..., T], *arguments: Any, num_processes: int | None = None) -> T:
    """Run `function(*arguments)` in each of `num_processes` on this machine; return what it returns in the main one.

    None: one process per GPU, or one process without a GPU. A single process is this one. Several
    are forked from it: the function and its arguments may be anything, also from a notebook; the
    result is pickled. Windows, which cannot fork, spawns them: there the function must be in a
    module. Under another launcher, such as torchrun, the processes exist already, and `function`
    runs in this one. Ctrl-C stops all of them cleanly.

    Raises:
        ConfigError: CUDA is in use in this process, there are fewer GPUs, or what is spawned cannot
            be pickled.
        UserError: what a process raised; `ProcessError` for any other error in it, or if it was
            killed.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(
            "LAUNCH", f"num_processes is {num_processes}: set it to 1 or more, or None"
        )
    prepare_cuda()
    wanted = num_processes or (1 if uses_cpu() else max(1, torch.cuda.device_count()))
    if wanted == 1 or setup_launch_env() > 1:
        return function(*arguments)
    action = partial(function, *arguments)
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    _check_can_start(action, wanted, method)
    # Fork from a new thread: a process forked from one that has used OpenMP, as most of torch does,
    # hangs in its first operation on several threads (libgomp, torch 2.13). torch ends the
    # processes with this thread.
    with ThreadPoolExecutor(1) as fresh_thread:
        processes, pipes = fresh_thread.submit(_start, action, wanted, method).result()
        outcomes = fresh_thread.submit(_receive, pipes)
        failure = _join(processes)
        return _find_result(outcomes.result(), failure)  # type: ignore[no-any-return]  # what `function` returned


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
    if num_processes > (num_gpus := torch.cuda.device_count()):
        fact = f"num_processes is {num_processes}, and there are {num_gpus} GPUs"
        raise ConfigError(
            "LAUNCH", f"{fact}: set it to at most that, or ACCELERATE_USE_CPU=true to use the CPU"
        )


def _check_can_pickle(action: partial[Any]) -> None:
    """A process that is spawned imports the function by its name."""
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
        "ACCEL_TRAINER_LAUNCHER": "launch",
    }
    shared |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    if uses_cpu():
        # or a plain `Accelerator()` would be alone, in each process
        shared["ACCELERATE_USE_CPU"] = "true"
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(num_processes)]
    senders = [sender for _, sender in pipes]
    # not which processes it ends after a failure
    logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)
    processes = start_processes(
        _run, (action, shared, senders), nprocs=num_processes, join=False, start_method=method
    )
    for sender in senders:
        sender.close()  # a pipe then ends with its process
    return processes, [receiver for receiver, _ in pipes]


def _run(
    rank: int, action: Callable[[], Any], shared: Mapping[str, str], pipes: Sequence[Connection]
) -> None:
    """Run `action` as process `rank`, and send its error, or the main process's result."""
    # If the launcher dies, torch sends SIGINT once per thread, and the second one exits without a
    # save.
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    forget_earlier_accelerators()  # of the process that started this one
    code = 0
    try:
        result = action()
        pipes[rank].send((None, None if rank else result))
    except UserError as error:
        pipes[rank].send((error, None))
        code = int(error.exit_code)
    except SystemExit as error:  # of a recipe's `main`, which has printed the reason
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        print_error(error)
        code = int(exit_code_of(error))
        pipes[rank].send(
            (ProcessError("PROCESS", f"rank {rank}: {describe_error(error)}", rank, code), None)
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # exit handlers belong to the process that started this one


def _receive(pipes: Sequence[Connection]) -> dict[int, tuple[UserError | None, Any]]:
    outcomes: dict[int, tuple[UserError | None, Any]] = {}
    for rank, pipe in enumerate(pipes):
        with suppress(EOFError):  # it was killed
            outcomes[rank] = pipe.recv()
    return outcomes


def _join(processes: ProcessContext) -> ProcessExitedException | None:
    """Wait until all have ended, and return the first failure, which ends the others."""
    while True:
        try:
            if processes.join():
                return None
        except KeyboardInterrupt:
            for process in processes.processes:
                process.terminate()
        except ProcessExitedException as failure:
            return failure


def _find_result(
    outcomes: Mapping[int, tuple[UserError | None, Any]], failure: ProcessExitedException | None
) -> Any:
    """Return the main process's result, or raise the error of the process that failed first."""
    if failure is None:
        return outcomes[0][1] if 0 in outcomes else None
    # A process that was killed has sent nothing: others may know more.
    for rank in sorted(outcomes, key=lambda rank: rank != failure.error_index):
        if (error := outcomes[rank][0]) is not None:
            raise error
    how = (
        f"was killed by {failure.signal_name}"
        if failure.signal_name
        else f"exited with code {failure.exit_code}"
    )
    rank = failure.error_index
    raise ProcessError("KILLED", f"rank {rank} {how}", rank, ExitCode.INTERNAL)
