"""Starts a user's recipe in a separate process, and delivers a fault to it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_trainer.commands import UNSAVED, Start

from .disk import FAULTY_DISK
from .fault_bringer import FAULT_BRINGER
from .faults import SAVE_EVERY, Fault

EVALUATE_EVERY = 6


@dataclass(frozen=True)
class Recipe:
    """What is started, where its runs go, and how many of them may live at once.

    `stops` are the signals to stop that have come so far.
    """

    path: str
    flags: Sequence[str]
    num_steps: int
    num_processes: int
    folder: Path
    at_once: int
    stops: Sequence[int]

    def first(self, name: str) -> Attempt:
        """Return the first start of a run in the folder `name`."""
        return Attempt(self.folder / name, self, self.num_processes)


@dataclass(frozen=True)
class Place:
    """The folder of a run and its starts, which has `run/`, `notes/` and logs."""

    folder: Path

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    @property
    def notes(self) -> Path:
        """The folder of what a run keeps that no checkpoint holds."""
        return self.folder / "notes"


@dataclass(frozen=True)
class Attempt(Place):
    """A start of `recipe` there.

    None: `num_workers` are those of the config, and no `fault` comes.
    """

    recipe: Recipe
    num_processes: int
    num_workers: int | None = None
    fault: Fault | None = None
    is_in_new_python: bool = False
    """In an interpreter that has imported nothing yet; otherwise, perhaps forked."""

    def start(self) -> Start:
        """Return the start of a few steps; all that decides what is learned stays."""
        changes: dict[str, Any] = {
            "run.output_dir": str(self.run),
            "run.track": (),
            "run.onnx": False,
            "run.quiet": True,
            "trainer.max_time_s": None,
            "trainer.evaluate_every": f"{EVALUATE_EVERY}steps",
            "trainer.log_every_n_steps": 1,
            "checkpoint.every_n_steps": SAVE_EVERY,
        }
        if self.num_workers is not None:
            changes["batch.num_workers"] = self.num_workers
        callbacks: dict[str, Mapping[str, Any]] = {UNSAVED: {"folder": str(self.notes)}}
        if self.fault is not None:
            callbacks[FAULT_BRINGER] = {}
        return Start(
            recipe=self.recipe.path,
            flags=[*self.recipe.flags, "--dry-run"],
            num_processes=self.num_processes,
            changes=changes,
            # the same in all runs, also where several run at once
            defaults={"runtime.num_threads": 1},
            until=self.recipe.num_steps,
            resume="auto",  # the same command continues
            callbacks=callbacks,
            disk=None if self.fault is None else (FAULTY_DISK, asdict(self.fault)),
        )


def begin(
    start: Start,
    command: Sequence[str] | None,
    log: Path,
    directory: Path,
    environment: Mapping[str, str],
) -> None:
    """Run the recipe in this new process, or the `command` that does, as the head of a session.

    What it says goes to `log` with the suffixes .out and .err.
    """
    os.setsid()  # so that all that it starts can be ended
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for stream, suffix in ((1, ".out"), (2, ".err")):
        descriptor = os.open(log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment, ACCEL_TRAINER_LAUNCHER="1")  # it ends with its parent
    if command is not None:
        code = subprocess.call(command)
        sys.exit(code if code >= 0 else 128 - code)
    multiprocessing.set_start_method(None, force=True)  # the recipe may choose one
    sys.argv = [start.recipe, *start.flags]
    sys.path.insert(0, str(Path(start.recipe).resolve().parent))
    runpy.run_path(start.recipe, run_name="__main__")


def _end_with_parent() -> None:
    """Wait for the end of the campaign; then end this session."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
