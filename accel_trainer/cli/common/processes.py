"""Starts a recipe in new processes, as a user would, and forwards signals to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import FrameType
from typing import IO, Any, TypeVar

from ...core.platform import STOP_SIGNALS, signals_handled
from ...run.extra_callbacks import START_VARIABLE
from ...run.folder import MOVED_FOLDERS
from ..recipe.start import Start

Stops = list[int]
"""The signals to stop that have come so far."""
T = TypeVar("T")
R = TypeVar("R")

# Without -P, `python -m` would import modules of the current folder, such as its torch.py.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_FLAGS = "--multi_gpu --num_machines 1 --main_process_port 0 --dynamo_backend no"
_LAUNCH = (*_SAFE_PATH, "-m", "accel_trainer.cli.launch", *_FLAGS.split())


def train_recipe(
    start: Start,
    *,
    errors: IO[Any] | None = None,
    received: Stops | None = None,
) -> int:
    """Train as `start` says without showing what the recipe prints, and return its exit code.

    `errors` receives stderr; None: it goes where this process's does. Several threads can train at
    once, inside one `forward_signals` whose list of signals is `received`; None: this call forwards
    them.

    Raises:
        KeyboardInterrupt: a signal to stop came.
    """
    with (
        forward_signals() if received is None else nullcontext(received) as stopped,
        start_recipe(start, output=subprocess.DEVNULL, errors=errors) as process,
    ):
        code = process.wait()
    if stopped:
        raise KeyboardInterrupt
    return code


def train_at_once(
    train_one: Callable[[T, Stops], R], items: Iterable[T], *, jobs: int
) -> Iterator[tuple[T, R]]:
    """Yield each item with what `train_one` returns for it, as they end; at most `jobs` at once.

    It is called with the item and the list for `received` of `train_recipe`.

    Raises:
        KeyboardInterrupt: a signal to stop came.
    """
    with forward_signals() as received, ThreadPoolExecutor(jobs) as threads:

        def begin(item: T) -> tuple[T, R]:
            if received:
                raise KeyboardInterrupt
            return item, train_one(item, received)

        waiting = [threads.submit(begin, item) for item in items]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def start_recipe(
    start: Start, *, output: IO[Any] | int | None = None, errors: IO[Any] | None = None
) -> subprocess.Popen[bytes]:
    """Start a recipe in new processes; call it inside `forward_signals`.

    The recipe ends when this process ends. `output` and `errors` receive stdout and stderr (None:
    they go where this process's do).
    """
    environment = environment_of(start, os.environ)
    environment["ACCEL_TRAINER_LAUNCHER"] = str(os.getpid())
    return subprocess.Popen(
        command_of(start, environment), env=environment, stdout=output, stderr=errors
    )


def environment_of(start: Start, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the variables of a start, and with what its command leaves out."""
    found = {MOVED_FOLDERS: "{}", **environment, **start.variables}
    found.pop(START_VARIABLE, None)
    if start.changes or start.callbacks:  # otherwise, the command is all of it
        found[START_VARIABLE] = json.dumps(asdict(start))
    return found


def command_of(start: Start, environment: Mapping[str, str]) -> list[str]:
    """Return the words that start a recipe in an environment: Python, or a launcher, before it."""
    words = [start.recipe, *start.flags]
    if start.num_processes == 1:
        return [sys.executable, *words]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    count = ["--num_processes", str(start.num_processes), "--mixed_precision", precision]
    return [sys.executable, *_LAUNCH, *count, *words]


@contextmanager
def stops_noted() -> Iterator[Stops]:
    """Yield a list of the stop signals that come inside the block; the second one interrupts it."""
    received: Stops = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    with signals_handled(note):
        yield received


@contextmanager
def forward_signals() -> Iterator[Stops]:
    """Forward signals to all children inside the block; yield the list of stop signals received.

    A first INT is forwarded as TERM: a terminal also sends INT to the children, and a second INT
    would make them exit at once. The launchers of torch and accelerate do not expose the children
    that they start, so `Popen` is patched to record them.
    """
    received: Stops = []
    children: list[subprocess.Popen[Any]] = []
    start = subprocess.Popen.__init__

    def start_and_record(self: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        children.append(self)
        if received:  # the signal came while another thread was starting it
            self.terminate()

    def forward(number: int, frame: FrameType | None) -> None:
        is_first = number not in received
        if number in STOP_SIGNALS:
            received.append(number)
        sent = signal.SIGTERM if number == signal.SIGINT and is_first else number
        for child in children:
            if child.returncode is None:
                child.send_signal(sent)

    with signals_handled(forward):
        # mypy refuses any assignment to a method; this one is undone below.
        subprocess.Popen.__init__ = start_and_record  # type: ignore[method-assign]
        try:
            yield received
        finally:
            subprocess.Popen.__init__ = start  # type: ignore[method-assign]
