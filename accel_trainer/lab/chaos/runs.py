"""Runs of a recipe, several at once, each with a plan of faults and restarted until it is done."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from accel_trainer import ExitCode
from accel_trainer.commands import (
    checkpoints_in,
    command_of,
    environment_of,
    new_process_context,
    uses_cpu,
)

from .faults import Fault, Plan
from .start import Attempt, Place, Recipe, begin

_POLL_S = 0.2
_LIMIT_S = 600.0  # of a start
_BY_KILL = (-9, 128 + 9)
# What a start may end with, beside 0 if it was done before its fault came.
_EXPECTED = {
    **dict.fromkeys(("kill", "write", "damage"), _BY_KILL),
    **dict.fromkeys(("term", "workers", "processes"), (ExitCode.PREEMPTED,)),
    "full": (ExitCode.OUTPUT, ExitCode.CHECKPOINT),
}


@dataclass(frozen=True)
class Ending(Place):
    """How a run with a plan of faults ended.

    `problem` is what went wrong before the run was done, `refused` why it does not allow what a
    fault changes: None if nothing. `reached` are the faults that came.
    """

    plan: Plan
    problem: str | None = None
    refused: str | None = None
    reached: Plan = ()
    codes: tuple[int | None, ...] = ()


Starts = Generator[Attempt, int | None, Ending]
"""Yields a start, and is sent its exit code: negative for a signal, None if it did not end."""


@dataclass
class _Life:
    """A process, what it is a start of, and when it must have ended."""

    process: BaseProcess
    starts: Starts
    deadline: float
    is_late: bool = False


def survive(first: Attempt, plan: Plan) -> Starts:
    """Start a run again and again, with a fault of the plan each time, until it is done."""
    ending = Ending(first.folder, plan)
    start = first
    for number, fault in enumerate((*plan, None)):
        code = yield replace(start, fault=fault)
        ending = replace(ending, codes=(*ending.codes, code))
        if code == 0:
            return ending
        before = plan[number - 1] if number else None
        if code == ExitCode.USAGE and before and before.kind in ("workers", "processes"):
            return replace(ending, refused=_last_line(ending))
        if fault is None or not _is_expected(fault, code, start.num_processes):
            return replace(ending, problem=_unexpected(ending, fault))
        ending = replace(ending, reached=(*ending.reached, fault))
        start = _after(fault, first)
    return ending


def _is_expected(fault: Fault, code: int | None, num_processes: int) -> bool:
    # when one of several processes is killed, the others report it, each with its own code
    is_killed = num_processes > 1 and _EXPECTED[fault.kind] == _BY_KILL
    return code is not None and (is_killed or code in _EXPECTED[fault.kind])


def _unexpected(ending: Ending, fault: Fault | None) -> str:
    code = ending.codes[-1]
    how = "did not end" if code is None else f"ended with exit code {code}"
    why = "" if fault is None else f" after {fault.described}"
    words = _last_line(ending)
    return f"start {len(ending.codes)} {how}{why}" + (f": {words}" if words else "")


def _last_line(ending: Ending) -> str:
    return said_by(ending).rpartition("\n")[2].removeprefix("accel_trainer: ")


def _after(fault: Fault, first: Attempt) -> Attempt:
    """Return the next start, after doing to the run's folder what the fault does there."""
    if fault.kind == "damage":
        damage_newest(first.run, random.Random(fault.value))
    if fault.kind == "workers":
        return replace(first, num_workers=int(fault.value))
    if fault.kind == "processes":
        return replace(first, num_processes=int(fault.value))
    return first


def damage_newest(run: Path, draw: random.Random) -> None:
    """Flip a byte of the newest checkpoint of a run, if there is an older one."""
    checkpoints = checkpoints_in(run)
    if len(checkpoints) < 2:
        return
    files = sorted(path for path in checkpoints[-1].path.rglob("*") if path.is_file())
    path = draw.choice([path for path in files if path.stat().st_size])
    with path.open("r+b") as file:
        file.seek(draw.randrange(path.stat().st_size))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


def log_of(folder: Path, number: int) -> Path:
    """Return the path, without its suffix, of the output of start `number`, which counts from 1."""
    return folder / f"start-{number}"


def said_by(ending: Ending) -> str:
    """Return what the last start of a run said on stderr."""
    log = log_of(ending.folder, len(ending.codes)).with_suffix(".err")
    return log.read_text(encoding="utf-8").rstrip()


# --- processes ---


def run_all(recipe: Recipe, runs: Iterable[Starts]) -> Iterator[Ending]:
    """Yield how each run of a recipe ended, as it ends; a few of their starts live at a time.

    A start that lives longer than ten minutes is ended. Whatever ends this iterator ends all that
    it has started.

    Raises:
        KeyboardInterrupt: a signal to stop came.
    """
    waiting = iter(runs)
    living: list[_Life] = []
    try:
        while True:
            if recipe.stops:
                raise KeyboardInterrupt
            for starts in islice(waiting, recipe.at_once - len(living)):
                living.append(_live(starts, next(starts)))
            if not living:
                return
            wait([life.process.sentinel for life in living], timeout=_POLL_S)
            for life in [*living]:
                if time.monotonic() > life.deadline:
                    life.is_late = True
                    _end(life.process)
                if life.process.is_alive():
                    continue
                living.remove(life)
                _end(life.process)
                try:
                    start = life.starts.send(None if life.is_late else life.process.exitcode)
                    living.append(_live(life.starts, start))
                except StopIteration as end:
                    yield end.value
    finally:
        for life in living:
            _end(life.process)
            life.process.join()


def _live(starts: Starts, attempt: Attempt) -> _Life:
    """Run a start in a new process."""
    attempt.notes.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(attempt.folder.glob("start-*.err")))
    start = attempt.start()
    environment = environment_of(start, os.environ)
    if uses_cpu():
        environment["ACCELERATE_USE_CPU"] = "true"
    command = None
    if attempt.num_processes > 1 or attempt.is_in_new_python:
        command = command_of(start, environment)
    arguments = (start, command, log_of(attempt.folder, number), Path.cwd(), environment)
    process = new_process_context().Process(target=begin, args=arguments)
    process.start()
    return _Life(process, starts, time.monotonic() + _LIMIT_S)


def _end(process: BaseProcess) -> None:
    """End a process and all in its session, such as the data workers of one that was killed."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()  # it had no session yet
