"""Runs programs whole and killed, and compares them in every byte that they leave."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_trainer import ExitCode, RecipeConfig, main
from accel_trainer.checkpoint.format import decode_files, read_files
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.errors import CheckpointError, shortened
from tests import processes
from tests.faults.tiny_run import whole

from .faults import Fault, reset_signals
from .left import differences, left_by
from .program import Program

# As a launcher does, the campaign ends a process that outlives its peer: in 1 of 1,000 kills, gloo
# waits for its own timeout (torch 2.13).
SURVIVOR_TIMEOUT_S = 120.0


def train(program: Program, folder: Path, fault: Fault | None) -> None:
    """Train in this process of a launch, as a recipe does."""
    reset_signals()
    # A server of its own for each process's workers would take seconds.
    multiprocessing.set_start_method("fork", force=True)
    # torch's, of noise on shards
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    draft = program.draft(folder)
    note_acknowledged(_acknowledged_by(folder))
    os.environ.update(draft.variables)
    if fault is None:
        main(lambda _: draft.train(), RecipeConfig, description="", argv=["--quiet"])
    with fault.installed():
        main(lambda _: draft.train(), RecipeConfig, description="", argv=["--quiet"])


def note_acknowledged(notes: Path) -> None:
    """Write down the name of each checkpoint once the run says that it is saved."""
    notes.parent.mkdir(parents=True, exist_ok=True)
    record = Checkpointer.record_best

    def noting(self: Checkpointer, best: Any, *, saved: str | None = None) -> None:
        if saved is not None:
            with notes.open("a") as file:
                file.write(saved + "\n")
        record(self, best, saved=saved)

    Checkpointer.record_best = noting  # type: ignore[method-assign]


def _acknowledged_by(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-acknowledged") / "names"


def lost(folder: Path) -> str | None:
    """Return the newest acknowledged checkpoint, if neither it nor a newer one is whole."""
    notes = _acknowledged_by(folder)
    # A kill can fall between the file's creation and its first line.
    newest = max(notes.read_text().split() if notes.exists() else (), default="")
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    found = (path for name in names if _is_whole(path := folder / "checkpoints" / name))
    return None if max((path.name for path in found), default="") >= newest else newest


def _is_whole(path: Path) -> bool:
    try:
        whole(decode_files(read_files(path), path).pieces)
    except CheckpointError:
        return False
    return True


@dataclass
class Outcome:
    """How a program went. `wrong` has a line for all that should not be so."""

    program: Program
    wrong: list[str] = field(default_factory=list)
    refused: str | None = None
    num_kills: int = 0
    num_preemptions: int = 0

    def __str__(self) -> str:
        if self.refused and not self.wrong:
            return f"refused: {self.refused}"
        state = shortened(self.wrong, most=3, separator="; ") or "equal"
        return f"{self.num_kills} killed, {self.num_preemptions} preempted: {state}"


@dataclass
class _Runner:
    """Starts a program in a folder."""

    program: Program
    scratch: Path

    def attempt(self, name: str, fault: Fault | None, number: int) -> tuple[list[int], str]:
        """Start it once; return the exit codes, and what the processes said."""
        counts = self.program.processes
        num_processes = counts[number % len(counts)]
        job = processes.start(
            train,
            self.program,
            self.scratch / name,
            fault,
            num_processes=num_processes,
            folder=self.scratch / f"{name}-{number}",
            has_workers=self.program.data == "workers",
        )
        codes = [-signal.SIGKILL if code is None else code for code in job.wait(SURVIVOR_TIMEOUT_S)]
        said = "".join(job.output(rank) for rank in range(num_processes)).splitlines()
        return codes, "\n".join(line for line in said if not self.program.says(line))


def try_program(program: Program, scratch: Path) -> Outcome:
    """Run a program whole, and killed and resumed; compare."""
    outcome = Outcome(program)
    codes, said = _Runner(program, scratch).attempt("whole", None, 0)
    error = re.search(r"error\[(\w+)\]", said)
    outcome.refused = error[1] if error and any(codes) else None
    if outcome.refused != program.refusal:
        expected = program.refusal or "no refusal"
        outcome.wrong.append(f"{outcome.refused} in place of {expected}: {_short(said)}")
    elif outcome.refused is None and (any(codes) or said):
        outcome.wrong.append(f"ended with {codes} and said: {_short(said)}")
    return outcome if outcome.wrong or outcome.refused else interrupted(program, scratch)


def interrupted(program: Program, scratch: Path) -> Outcome:
    """Run a program killed and resumed; compare with what it has left whole in `scratch`."""
    for earlier in scratch.glob("killed*"):
        shutil.rmtree(earlier)
    outcome = Outcome(program)
    runner = _Runner(program, scratch)
    for number, fault in enumerate((*program.faults, None)):
        codes, said = runner.attempt("killed", fault, number)
        was_killed = -signal.SIGKILL in codes
        was_preempted = not was_killed and ExitCode.PREEMPTED in codes
        outcome.num_kills += was_killed
        outcome.num_preemptions += was_preempted
        is_bad = any(codes) if fault is not None else any(codes) or said
        if is_bad and not (fault and (was_killed or was_preempted)):
            outcome.wrong.append(f"attempt {number} ended with {codes} and said: {_short(said)}")
        if name := lost(scratch / "killed"):
            outcome.wrong.append(f"after attempt {number}, the acknowledged {name} is lost")
        if outcome.wrong:
            return outcome
    left = (left_by(scratch / name) for name in ("whole", "killed"))
    outcome.wrong += differences(*left, keeps_all=program.keeps_all)
    return outcome


def _short(said: str) -> str:
    """Return the end of what a program said, in one line."""
    return " | ".join(said.strip().splitlines())[-400:] or "nothing"


def tried(program: Program, scratch: Path) -> Outcome:
    """Try a program in `scratch`, and empty that unless something is wrong."""
    shutil.rmtree(scratch, ignore_errors=True)
    outcome = try_program(program, scratch)
    if not outcome.wrong:
        shutil.rmtree(scratch)
    return outcome


def simplest(program: Program, scratch: Path) -> Outcome:
    """Return the outcome of a program of which no part can be left out, so that it is still wrong.

    Another mistake may take the place of the first.
    """
    found = tried(program, scratch)
    while found.wrong:
        for simpler in found.program.simpler():
            outcome = tried(simpler, scratch)
            if outcome.wrong:
                found = outcome
                break
        else:
            break
    return found
