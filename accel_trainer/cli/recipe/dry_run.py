"""`--dry-run`: trains a few steps, resumes in a new process, and compares what both runs leave."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from ...callbacks.console import say
from ...checks.subject import first_difference
from ...core.errors import CheckpointError, ConfigError
from ...core.json_files import read_json_object
from ...core.logger import logger
from ...core.wording import counted
from ...distributed.accelerator import uses_cpu
from ...run.config import RecipeConfig
from ...run.extra_callbacks import START_VARIABLE
from ...training.callback import RunResult
from ..runs.checkpoints import checkpoints_in
from .exit import exit_with
from .forks import new_process_context
from .same_run import cause_of, difference_of_runs, lost_state, state_of
from .start import Start
from .train_as import train_as
from .unsaved import UNSAVED, file_of

C = TypeVar("C", bound=RecipeConfig)


NUM_STEPS = 3
"""Steps before the resume, and again after it."""


def dry_run(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train 6 steps at once, and 3 + 3 with a resume in between, and compare what the runs leave.

    Both run in a temporary folder. Each part runs in a new process, as after an interruption, on
    the processes of the launch, with at most `MAX_EVAL_SAMPLES` samples in an evaluation. State
    that changes only later is not compared.

    Raises:
        CheckpointError: the run does not repeat itself, or its resume is not exact.
        SystemExit: a part failed, and has said why.
    """
    start_s = time.perf_counter()
    if config.trainer.hours is not None and os.environ.get("RANK", "0") == "0":
        say(
            f"--hours {config.trainer.hours:g}: the run will measure its steps, and decide once at "
            "which one its learning rate begins to decay; the dry run decides nothing"
        )
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        result = _train_apart(train, config, _part(whole, 2 * NUM_STEPS), is_first=True)
        num_before = min(NUM_STEPS, result.position.optimizer_step // 2)
        for until, is_resume in ((num_before, False), (2 * NUM_STEPS, num_before > 0)):
            if until and result.state == "done":
                part = _part(parts, until)
                result = _train_apart(train, config, part, is_first=False, is_resume=is_resume)
        if result.state == "done" and num_before and os.environ.get("RANK", "0") == "0":
            compared = _compare(whole, parts, num_before)
            seconds = time.perf_counter() - start_s
            say(f"dry run ok in {seconds:.1f} s: {compared}; no files are left")
    return result


def _part(folder: Path, until: int) -> Start:
    """Return the start of a part, up to step `until`: all else is as in the run itself."""
    notes = _notes_of(folder)
    notes.mkdir(exist_ok=True)
    return Start(
        recipe=sys.argv[0],
        changes={
            "run.output_dir": str(folder),
            "run.resume": "auto",
            "run.track": (),
            "run.quiet": True,
            "run.dry_run": True,
            "checkpoint.every_n_steps": NUM_STEPS,
            "checkpoint.keep_every_n_steps": NUM_STEPS,
        },
        until=until,
        callbacks={UNSAVED: {"folder": str(notes)}},
    )


def _notes_of(run: Path) -> Path:
    """Return the folder of what a run keeps that no checkpoint holds."""
    return run.with_name(f"{run.name}-notes")


# --- a part, in a process of its own ---


def _train_apart(
    train: Callable[[C], RunResult],
    config: C,
    part: Start,
    *,
    is_first: bool,
    is_resume: bool = False,
) -> RunResult:
    """Return the result of a part in a new process.

    A resume gets a new interpreter: its sets have a different order, as after an interruption.
    """
    context = multiprocessing.get_context("spawn") if is_resume else new_process_context()
    receiver, sender = context.Pipe(duplex=False)
    environment = {**os.environ, START_VARIABLE: json.dumps(asdict(part))}
    process = context.Process(
        target=_run_part, args=(train, config, part, sender, environment, is_first)
    )
    try:
        process.start()
    except (AttributeError, TypeError, ValueError) as error:  # cannot be pickled
        fact = f"--dry-run starts train in a new process, which cannot import it ({error})"
        raise ConfigError(
            "DRY_RUN", f"{fact}: define train at the top level of its file"
        ) from error
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]  # what the process sent
    except EOFError:
        process.join()
        raise SystemExit(
            process.exitcode if process.exitcode and process.exitcode > 0 else 1
        ) from None
    finally:
        process.join()


def _run_part(
    train: Callable[[C], RunResult],
    config: C,
    part: Start,
    sender: Connection,
    environment: dict[str, str],
    is_first: bool,
) -> None:
    # it ends with the process that waits for it
    os.environ.update(environment, ACCEL_TRAINER_LAUNCHER="1")
    logging.basicConfig(
        format="%(levelname)s: %(message)s", level=logging.WARNING if is_first else logging.ERROR
    )

    def run() -> RunResult:
        result = train_as(part, train, config)
        sender.send(result)
        return result

    exit_with(run, config.run.debug)


# --- the comparison ---


def _compare(whole: Path, parts: Path, num_before: int) -> str:
    """Return what is equal. Raises CheckpointError that names the first difference."""
    saved, again = map(checkpoints_in, (whole, parts))
    # A whole run that is too short has no checkpoint there.
    pairs = [
        (one, other)
        for one in saved
        for other in again
        if one.name == other.name and one.step == num_before
    ]
    if pairs and (path := first_difference(*map(state_of, pairs[-1]))):
        _refuse_unrepeatable(path, num_before, whole)
        return (
            "trained, evaluated, saved, loaded and resumed, "
            f"but the run does not repeat itself ({path})"
        )
    if path := difference_of_runs(whole, parts):
        fact = (
            f"a run that is stopped after {counted(num_before, 'step')} and resumed in a new "
            f"process differs in {path}"
        )
        notes = (file_of(_notes_of(run), NUM_STEPS) for run in (whole, parts))
        cause = cause_of(path, lost_state(*notes))
        raise CheckpointError("CKPT_INEXACT", f"{fact} from one that is not: {cause}")
    last = state_of(saved[-1])
    num_tensors = sum(len(piece) for name, piece in last.items() if name in ("model", "ema"))
    num_steps = last["trainer"]["position"]["optimizer_step"]
    return (
        f"{counted(num_steps, 'step')} at once, and {counted(num_before, 'step')} and a resume in "
        f"a new process, gave the same {num_tensors} tensors, optimizer state, rows and evaluation"
    )


def _refuse_unrepeatable(path: str, num_steps: int, run: Path) -> None:
    """Raise CheckpointError on the CPU, where torch's kernels are deterministic; else warn."""
    fact = f"two runs of {counted(num_steps, 'step')} from the same start differ in {path}"
    if operations := read_json_object(run / "result.json").get("nondeterministic_operations"):
        fact += f"; torch has no deterministic kernel for {', '.join(operations)}"
    fix = "draw random numbers with torch's generator, in a forward or a sample, and read no clock"
    if not uses_cpu():
        logger.warning("[NOT_REPEATABLE] %s, so a resume cannot be compared: %s", fact, fix)
        return
    raise CheckpointError("NOT_REPEATABLE", f"{fact}, so no resume is exact: {fix}")
