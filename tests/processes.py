"""Real processes for tests, forked from a server with torch imported: 0.1 s each, not 2 s."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from .ports import free_port

# Windows can only spawn.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
context = multiprocessing.get_context(METHOD)
# What most processes would import: the first optimizer step torch._dynamo, most of a second, and
# test modules pytest.
PRELOADED = [
    "tests.workload",
    "torch._dynamo",
    "recipes.cifar",
    "sklearn.datasets",
    "typeguard",
    "pytest",
    "tests.frozen",  # the last
]
context.set_forkserver_preload(PRELOADED)

if METHOD == "forkserver":
    from multiprocessing import popen_forkserver

    class _Popen(popen_forkserver.Popen):
        """Reads the exit code once, whichever thread asks for it.

        Starting a process asks for the codes of all others. Where two threads read one at the same
        time, Python tells the second 255 (3.11 to 3.14).
        """

        _reading = threading.Lock()

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            while True:
                with self._reading:
                    code = super().poll()
                if code is not None or flag == os.WNOHANG:
                    return code
                wait([self.sentinel], 0.1)  # no longer: a different thread may read it

    context.Process._Popen = staticmethod(_Popen)  # type: ignore[assignment]


# torch's warning where no name server can be reached.
_WITHOUT_NAMES = re.compile(r"\[W.*The hostname of the client socket cannot be retrieved.*\n")


@atexit.register
def kill_all() -> None:
    """Kill what a test that timed out has left: Python would wait for it at its end."""
    for process in multiprocessing.active_children():
        process.kill()


@dataclass
class Job:
    """The processes of one launch; `output` of a rank is what it printed."""

    processes: list[BaseProcess]
    folder: Path

    def wait(self, timeout_s: float = 600) -> list[int | None]:
        """Return the exit codes: negative for a signal, None if a process had to be killed."""
        codes: list[int | None] = []
        for process in self.processes:
            process.join(timeout_s)
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes

    def output(self, rank: int = 0) -> str:
        """Return what a rank wrote to stdout and stderr, without what the machine adds."""
        return _WITHOUT_NAMES.sub("", (self.folder / f"rank-{rank}.log").read_text())


def like_torchrun(rank: int, num_processes: int) -> dict[str, str]:
    """Return the variables that say which process this is."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
    }


def start(
    target: Callable[..., Any],
    *arguments: Any,
    num_processes: int = 1,
    folder: Path,
    has_workers: bool = False,
    variables: Callable[[int, int], dict[str, str]] = like_torchrun,
) -> Job:
    """Start `target(*arguments)` in processes that meet through `variables`; log to `folder`.

    They end with the test run, unless they have data workers: Python gives a daemon no children.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    job = Job([], folder)
    for rank in range(num_processes):
        environment = {"OMP_NUM_THREADS": "1"}
        if num_processes > 1:
            environment |= {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": str(port)}
            environment |= variables(rank, num_processes)
        log = folder / f"rank-{rank}.log"
        process = context.Process(
            target=_child, args=(log, environment, target, arguments), daemon=not has_workers
        )
        process.start()
        job.processes.append(process)
    return job


def run(
    target: Callable[..., Any],
    *arguments: Any,
    num_processes: int = 1,
    folder: Path,
    codes: Sequence[int] | None = None,
    has_workers: bool = False,
) -> Job:
    """Run `target` to its end, in processes that must have these `codes`; None: must succeed."""
    codes = codes or [0] * num_processes
    shape: dict[str, Any] = {"num_processes": len(codes), "has_workers": has_workers}
    job = start(target, *arguments, folder=folder, **shape)
    found = job.wait()
    outputs = "\n".join(job.output(rank) for rank in range(len(codes)))
    assert found == [*codes], f"exit codes {found}:\n{outputs}"
    return job


def run_on(
    accelerator: str,
    target: Callable[..., Any],
    *arguments: Any,
    num_processes: int = 1,
    folder: Path,
) -> Job:
    """Run `target` to its end on the `gpu`, or on the `pretend` accelerator (see `pretend.py`)."""
    return run(
        _on_accelerator, accelerator, target, arguments, num_processes=num_processes, folder=folder
    )


def _on_accelerator(
    accelerator: str, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if accelerator == "pretend":
        from . import pretend  # noqa: F401  # makes itself the accelerator of this process
    target(*arguments)


def _child(
    log: Path, environment: dict[str, str], target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    # A crash outside Python shows where, in every thread. Not beside faulthandler, on whose small
    # stack torch would write: that corrupts the heap.
    if sys.platform == "linux":
        torch._C._set_print_stack_traces_on_fatal_signal(True)
    os.environ.update(environment)
    target(*arguments)
