"""One start of a user's recipe, in a process of its own, with the fault that comes to it.

The recipe runs as a file, as Python would run it. In this process, three things have another in
their place: what `main` calls for `--dry-run` trains with shortened settings, the disk can fail,
and the callback of a dry run also delivers the fault.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...core import filesystem
from ...core.callback import RunResult, TrainerView
from ...core.types import StepReport
from ...run import build
from ...run.config import RecipeConfig
from ...run.dry_run import UnsavedStateRecorder
from ..recipe import main as recipe_main
from .disk import FaultyDisk
from .faults import SAVE_EVERY, Fault

C = TypeVar("C", bound=RecipeConfig)

EVALUATE_EVERY = 6


@dataclass(frozen=True)
class Start:
    """A start of `recipe` with its `flags`, in `folder`, which gets `run/` and `notes/`.

    None: `num_workers` are those of the config, and no `fault` comes.
    """

    recipe: str
    flags: Sequence[str]
    folder: str
    num_steps: int
    num_processes: int = 1
    num_workers: int | None = None
    fault: Fault | None = None
    is_in_new_python: bool = False
    """In an interpreter that has imported nothing yet; otherwise, perhaps forked."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return Path(self.folder, "run")

    @property
    def notes(self) -> Path:
        """The folder of what a run keeps that no checkpoint holds."""
        return Path(self.folder, "notes")


def to_json(start: Start) -> str:
    """Return a start as one word of a command line."""
    return json.dumps(asdict(start))


def _from_json(text: str) -> Start:
    values = json.loads(text)
    fault = values.pop("fault")
    return Start(**values, fault=None if fault is None else Fault(**fault))


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
    if command is None:
        _run(start)
    else:
        code = subprocess.call(command)
        sys.exit(code if code >= 0 else 128 - code)


def _end_with_parent() -> None:
    """Wait for the end of the campaign; then end this session."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _run(start: Start) -> None:
    """Run the recipe in this process, as `python RECIPE flags` does."""
    multiprocessing.set_start_method(None, force=True)  # the recipe may choose one
    disk = FaultyDisk(start.run)
    if start.fault is not None and start.fault.kind == "write" and start.fault.step == 0:
        disk.num_left = int(start.fault.value)
    filesystem.disk = disk
    vars(recipe_main)["dry_run"] = partial(_train_shortened, start)
    vars(build)["UnsavedStateRecorder"] = partial(FaultBringer, start=start, disk=disk)
    sys.argv = [start.recipe, *start.flags, "--dry-run"]
    sys.path.insert(0, str(Path(start.recipe).resolve().parent))
    runpy.run_path(start.recipe, run_name="__main__")


def _train_shortened(start: Start, train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train a few steps in the folder of the start; all that decides what is learned stays."""
    given = config.trainer.max_steps
    workers = config.batch.num_workers if start.num_workers is None else start.num_workers
    return train(
        replace(
            config,
            run=replace(
                config.run,
                output_dir=start.run,
                # the same command continues
                resume="auto" if config.run.resume == "never" else config.run.resume,
                track=(),
                profile=False,
                onnx=False,
                quiet=True,
            ),
            batch=replace(config.batch, num_workers=workers),
            trainer=replace(
                config.trainer,
                max_steps=start.num_steps if given is None else min(given, start.num_steps),
                max_time_s=None,
                evaluate_every=f"{EVALUATE_EVERY}steps",
                log_every_n_steps=1,
            ),
            checkpoint=replace(config.checkpoint, every_n_steps=SAVE_EVERY),
            # the same in all runs, also where several run at once
            runtime=replace(config.runtime, num_threads=config.runtime.num_threads or 1),
        )
    )


class FaultBringer(UnsavedStateRecorder):
    """Records what no checkpoint holds, and delivers the fault of its start."""

    def __init__(
        self, folder: Path, parts: Mapping[str, Any], *, start: Start, disk: FaultyDisk
    ) -> None:
        super().__init__(start.notes, parts)
        self._notes = start.notes
        self._fault = start.fault
        self._disk = disk

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the state that a resume begins with."""
        self._record(trainer)
        self._deliver(trainer, 0)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Record the state, and deliver the fault if it is due."""
        if report.optimizer_step % SAVE_EVERY == 0:
            self._record(trainer)
        self._deliver(trainer, report.optimizer_step)

    def _record(self, trainer: TrainerView) -> None:
        """Record it in a folder of this step."""
        self._folder = self._notes / f"{trainer.state.optimizer_step:08}"
        self._folder.mkdir(exist_ok=True)
        super()._record(trainer)

    def _deliver(self, trainer: TrainerView, step: int) -> None:
        """Deliver the fault to the main process if it is one of the disk, else to any."""
        fault = self._fault
        if fault is None or fault.step != step:
            return
        if fault.kind == "write":
            self._disk.num_left = int(fault.value)
        elif fault.kind == "full":
            self._disk.is_full = True
        elif fault.step % trainer.accelerator.num_processes != trainer.accelerator.process_index:
            return
        elif fault.kind == "kill" and fault.value:
            kill = threading.Timer(fault.value, _send, (signal.SIGKILL,))
            kill.daemon = True
            kill.start()
        else:
            _send(signal.SIGKILL if fault.kind in ("kill", "damage") else signal.SIGTERM)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current folder, of `python -m`
    _run(_from_json(sys.argv[1]))
