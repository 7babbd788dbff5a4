"""`--dry-run`: trains a few steps, resumes in a new process, and compares what both runs leave."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from ...checkpoint.format import list_checkpoints
from ...core.callback import RunResult
from ...core.console import say
from ...core.errors import CheckpointError, ConfigError
from ...core.json_files import read_json_object
from ...distributed.accelerator import uses_cpu
from ...run.config import RecipeConfig
from ...run.dry_run import NUM_STEPS
from ...training.rehearsal import first_difference
from .exit import exit_with
from .forks import new_process_context

C = TypeVar("C", bound=RecipeConfig)

_logger = logging.getLogger(__name__)


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
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        longest = _trial(config, whole, 2 * NUM_STEPS)
        result = _train_apart(train, longest, is_first=True)
        num_before = min(NUM_STEPS, result.position.optimizer_step // 2)
        for max_steps in (num_before, 2 * NUM_STEPS):
            if max_steps and result.state == "done":
                result = _train_apart(train, _trial(config, parts, max_steps), is_first=False)
        if result.state == "done" and num_before and os.environ.get("RANK", "0") == "0":
            compared = _compare(whole, parts, num_before)
            seconds = time.perf_counter() - start_s
            say(f"dry run ok in {seconds:.1f} s: {compared}; no files are left")
    return result


def _trial(config: C, folder: Path, max_steps: int) -> C:
    """Return the config of a part: all else as in the run itself."""
    given = config.trainer.max_steps
    saves = replace(config.checkpoint, every_n_steps=NUM_STEPS, keep_every_n_steps=NUM_STEPS)
    return replace(
        config,
        run=replace(
            config.run, output_dir=folder, resume="auto", track=(), quiet=True, dry_run=True
        ),
        trainer=replace(
            config.trainer, max_steps=max_steps if given is None else min(given, max_steps)
        ),
        checkpoint=saves,
    )


# --- a part, in a process of its own ---


def _train_apart(train: Callable[[C], RunResult], config: C, *, is_first: bool) -> RunResult:
    """Return the result of `train(config)` in a new process.

    A resume gets a new interpreter: its sets have another order, as after an interruption.
    """
    folder = config.run.output_dir
    is_resume = folder is not None and folder.exists()
    context = multiprocessing.get_context("spawn") if is_resume else new_process_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_run_part, args=(train, config, sender, dict(os.environ), is_first)
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
        result = train(config)
        sender.send(result)
        return result

    exit_with(run, config.run.debug)


# --- the comparison ---


def _compare(whole: Path, parts: Path, num_before: int) -> str:
    """Return what is equal. Raises CheckpointError that names the first difference."""
    # Here, since most starts of a recipe compare nothing.
    from .same_run import cause_of, difference_of_runs, lost_state, state_of

    saved, again = (list_checkpoints(folder / "checkpoints") for folder in (whole, parts))
    # A run in one go has none after few steps.
    before = [each for each in saved if each.name.startswith(f"step-{num_before:010d}-")]
    pairs = [
        (state_of(one), state_of(other))
        for one in before
        for other in again
        if one.name == other.name
    ]
    if pairs and (path := first_difference(*pairs[-1])):
        _refuse_unrepeatable(path, num_before, whole)
        return (
            "trained, evaluated, saved, loaded and resumed, "
            f"but the run does not repeat itself ({path})"
        )
    if path := difference_of_runs(whole, parts):
        fact = (
            f"a run that is stopped after {num_before} steps and resumed in a new process "
            f"differs in {path}"
        )
        cause = cause_of(path, lost_state(whole, parts))
        raise CheckpointError("CKPT_INEXACT", f"{fact} from one that is not: {cause}")
    last = state_of(saved[-1])
    num_tensors = sum(len(piece) for name, piece in last.items() if name in ("model", "ema"))
    num_steps = last["trainer"]["position"]["optimizer_step"]
    return (
        f"{num_steps} steps at once, and {num_before} steps and a resume in a new process, "
        f"gave the same {num_tensors} tensors, optimizer state, rows and evaluation"
    )


def _refuse_unrepeatable(path: str, num_steps: int, run: Path) -> None:
    """Raise CheckpointError on the CPU, where torch's kernels are deterministic; else warn."""
    fact = f"two runs of {num_steps} steps from the same start differ in {path}"
    if operations := read_json_object(run / "result.json").get("nondeterministic_operations"):
        fact += f"; torch has no deterministic kernel for {', '.join(operations)}"
    fix = "draw random numbers with torch's generator, in a forward or a sample, and read no clock"
    if not uses_cpu():
        _logger.warning("[NOT_REPEATABLE] %s, so a resume cannot be compared: %s", fact, fix)
        return
    raise CheckpointError("NOT_REPEATABLE", f"{fact}, so no resume is exact: {fix}")
