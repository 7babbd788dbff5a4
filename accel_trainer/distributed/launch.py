"""Starts several processes from a plain script or notebook, without a launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]  # not in __all__
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from ..core.config import answers_unknown
from ..core.errors import ConfigError, ExitCode, OneLineError, Preempted, ProcessError, here
from ..core.platform import RUN_SIGNALS, STOP_SIGNALS, signals_handled
from ..core.user_code import describe_error, exit_code_of, print_error
from .accelerate_settings import reset_accelerate
from .accelerator import uses_cpu
from .determinism import prepare_cuda
from .launch_env import setup_launch_env

T = TypeVar("T")

_WAIT_FOR_FIRST_S = 1.0  # for the process that failed to have sent its error


@answers_unknown
def launch(function: Callable[..., T], *arguments: Any, num_processes: int | None = None) -> T:
    """Run `function(*arguments)` in `num_processes` processes; return the main one's result.

    None: one process per GPU, or one process without a GPU. One process runs in the caller. Several
    are forked from it on this machine: the function and its arguments may be anything, also from a
    notebook; the result is pickled. Windows cannot fork and spawns them: there the function must be
    in a module. Under a launcher such as torchrun the processes exist already, and `function` runs
    in the caller. Ctrl-C and other signals go to all processes.

    What ends one process that runs in the caller ends the caller in the same way if there are
    several.

    Raises:
        ConfigError: CUDA is in use in this process, there are fewer GPUs than processes, or the
            function cannot be pickled for a spawned process.
        OneLineError: raised by a process, such as Preempted; `ProcessError` for any other error in
            it, or if it was killed.
        SystemExit, KeyboardInterrupt: raised by a process.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(
            "LAUNCH", f"num_processes is {num_processes}: set it to 1 or more, or None"
        )
    prepare_cuda()
    wanted = num_processes or (1 if uses_cpu() else max(1, torch.cuda.device_count()))
    action = partial(function, *arguments)
    if wanted == 1 or setup_launch_env() > 1:
        return action()
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    _check_can_start(action, wanted, method)
    # Fork from a new thread. A process forked from a thread that has used OpenMP, as most of torch
    # does, hangs in its first multithreaded operation (libgomp, torch 2.13). The thread must
    # outlive the processes, since torch ends them with the thread that started them.
    with ThreadPoolExecutor(1) as fresh_thread:
        _hold_signals(True)  # until somebody forwards them
        try:
            processes, pipes = fresh_thread.submit(_start, action, wanted, method).result()
        except BaseException:
            _hold_signals(False)
            raise
        outcomes = fresh_thread.submit(_receive, pipes)
        with _signals_forwarded(processes.processes) as received:
            _hold_signals(False)
            failure = _join(processes)
        return _find_result(outcomes.result(), failure, received)  # type: ignore[no-any-return]  # it is a T


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
    _hold_signals(False)
    code = 0
    try:
        result = action()
        # `send` would pass tensors as handles to shared memory, which ends with this process.
        data = pickle.dumps((True, None if rank else result))
    except (OneLineError, SystemExit, KeyboardInterrupt) as error:
        code = _exit_code(error)
        data = pickle.dumps((False, error))
        if isinstance(error, ProcessError) and error.rank != rank:
            time.sleep(_WAIT_FOR_FIRST_S)  # the first to exit ends the others
    except Exception as error:
        code = exit_code_of(error)
        print_error(error)
        said = ProcessError("PROCESS", f"rank {rank}: {describe_error(error)}", rank, code)
        data = pickle.dumps((False, said))
    pipes[rank].send_bytes(data)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed
        stream.flush()
    os._exit(code)  # without the exit handlers, which belong to the parent


def _exit_code(error: BaseException) -> int:
    """Return 0 for a stop on which all agree: with any other code, torch would end the others."""
    if isinstance(error, Preempted):
        return 0
    if isinstance(error, OneLineError):
        return error.exit_code
    if isinstance(error, SystemExit):  # from a recipe's `main`, which has printed the reason
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT


def _receive(pipes: Sequence[Connection]) -> dict[int, tuple[bool, Any]]:
    """Return what each process sent, by rank: whether it is a result, and that or the error."""
    outcomes = {}
    for rank, pipe in enumerate(pipes):
        with suppress(EOFError):  # the process was killed
            outcomes[rank] = pipe.recv()
    return outcomes


def _join(processes: ProcessContext) -> ProcessExitedException | None:
    """Wait until all processes have ended, and return the first failure, which ends the others."""
    try:
        while not processes.join():
            pass
    except ProcessExitedException as failure:
        return failure
    return None


def _hold_signals(are_held: bool) -> None:
    """Hold signals back or no longer, in this thread and what it starts; not on Windows."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK if are_held else signal.SIG_UNBLOCK, RUN_SIGNALS)


@contextmanager
def _signals_forwarded(processes: Sequence[Any]) -> Iterator[list[int]]:
    """Forward signals to the processes inside the block; yield the list of those that ask to stop.

    A first INT is forwarded as TERM: a terminal also sends INT to the processes, and a second INT
    would make them exit at once. Outside the main thread, where no signal arrives, do nothing.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        sent = signal.SIGTERM if number == signal.SIGINT and not received else number
        if number in STOP_SIGNALS:
            received.append(number)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, sent)

    with signals_handled(forward):
        yield received


def _find_result(
    outcomes: Mapping[int, tuple[bool, Any]],
    failure: ProcessExitedException | None,
    received: Sequence[int],
) -> Any:
    """Return the main process's result, or raise what has ended the processes.

    That is the error of the one that failed first, rather than an error about another process, or
    the signal that this process has received.
    """
    # A process that was killed has sent nothing, but another may have sent an error.
    first = 0 if failure is None else failure.error_index
    by_rank = {first: outcomes.get(first, (True, None)), **(outcomes if failure else {})}
    errors = [found for is_result, found in by_rank.values() if not is_result]
    for error in errors:
        if isinstance(error, Preempted):
            raise here(error)
        if isinstance(error, OneLineError) and not isinstance(error, ProcessError):
            raise error
    if received:
        signal.raise_signal(received[0])  # it has the effect that it has without processes
    for error in errors:
        raise error
    if failure is not None:
        code = failure.exit_code if failure.exit_code in {*ExitCode} else ExitCode.INTERNAL
        raise ProcessError("KILLED", str(failure), first, code)
    return by_rank[0][1]
