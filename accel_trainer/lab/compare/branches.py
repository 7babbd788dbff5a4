"""Trains the runs of a comparison: a beginning for each seed, and arms that branch off from it.

A run that is finished is never trained again, and one that was stopped continues: each has a folder
of its own, whose name is a hash of what decides the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_trainer import ExitCode, OutputError
from accel_trainer.commands import (
    RunReader,
    Start,
    Stops,
    complete_by_step,
    prepare_directory,
    read_run,
)

from ..environment import environment_here
from ..replay.replay import OWN_WEIGHTS
from ..silent import train_silently
from .question import Arm, At, Question, key_of

ENDED = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.DIVERGED)
"""How a run of a comparison may end: one that has diverged loses."""
_OWN_FLAGS = ("--quiet", "--trainer.max-time-s", "None")


@dataclass(frozen=True)
class Branches:
    """The runs below `folder`, whose arms branch off after `step`; 0: they are whole runs."""

    question: Question
    folder: Path
    step: int

    def beginning(self, seed: int) -> Path:
        """Return the folder of the beginning that both arms of a seed share."""
        return self.folder / "beginning" / f"seed-{seed}"

    def arm(self, arm: Arm, seed: int) -> Path:
        """Return the folder of an arm."""
        return self.folder / f"arm-{arm.key}" / f"seed-{seed}"

    def has_beginning(self, seed: int) -> bool:
        """Whether the beginning of a seed is there, or none is needed."""
        return not self.step or self._checkpoint(seed) is not None

    def train_beginning(self, seed: int, received: Stops | None = None) -> None:
        """Train A up to the step at which the arms part, unless that is done.

        Raises OutputError if the recipe failed, or ended before.
        """
        if self.has_beginning(seed):
            return
        folder = self.beginning(seed)
        flags = [*self.question.a.flags, "--seed", str(seed), "--max-steps", str(self.step)]
        self._train(flags, folder, received)
        if self._checkpoint(seed) is None:
            state = read_run(folder).state
            fact = f"{folder} ended before step {self.step} ({state})"
            raise OutputError("COMPARE", f"{fact}: give an earlier --at, or inspect the run")

    def train_arm(
        self,
        arm: Arm,
        seed: int,
        received: Stops | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        """Train an arm to its end, from the beginning if it shares one, unless that is done.

        `folder` is a new one for a repetition; None: the arm's own.
        """
        folder = folder or self.arm(arm, seed)
        if finished(folder) is not None:
            return
        allowed = self.question.may_change if arm is not self.question.a else []
        self._train(
            [*arm.flags, "--seed", str(seed), *self._origin(seed, allowed)], folder, received
        )
        if finished(folder) is None:
            fact = f"{folder} was stopped before its end ({read_run(folder).state})"
            raise OutputError("COMPARE", f"{fact}: run the same command again to continue it")

    def _origin(self, seed: int, allowed: Sequence[str]) -> list[str]:
        """Return the flags that set where an arm begins, and what it may change there."""
        if not self.step:
            return []
        checkpoint = self._checkpoint(seed)
        assert checkpoint is not None  # it was trained before
        change = ["--allow-change", *allowed] if allowed else []
        return ["--resume", str(checkpoint), *OWN_WEIGHTS, *change]

    def _checkpoint(self, seed: int) -> Path | None:
        found = complete_by_step(self.beginning(seed)).get(self.step)
        return None if found is None else found.path.resolve()

    def _train(self, flags: Sequence[str], folder: Path, received: Stops | None) -> None:
        prepare_directory(folder.parent)
        start = Start(
            recipe=str(self.question.recipe),
            flags=[*flags, "--output-dir", str(folder), *_OWN_FLAGS],
            num_processes=self.question.num_processes,
        )
        train_silently(start, "COMPARE", f"training {folder}", may_end=ENDED, received=received)


def folder_of_branches(parent: Path, question: Question, at: At | None) -> Path:
    """Return the folder of runs that share what decides them; `at` None: of whole runs."""
    here = environment_here()
    decides = [question.files(), question.num_processes, here]
    if at is None:
        return parent / f"whole-{key_of(decides)}"
    return parent / f"at-{at.text.rstrip('%')}-{key_of([*decides, at.text, question.a.settings])}"


def finished(folder: Path) -> RunReader | None:
    """Return a run that is done, or has diverged; None: it is not there, or not finished."""
    with suppress(OutputError):
        run = read_run(folder)
        if run.state in ("done", "diverged"):
            return run
    return None
