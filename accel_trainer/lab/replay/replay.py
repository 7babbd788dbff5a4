"""Trains a stretch of a recorded run again: the one way in which commands repeat what happened."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel_trainer import ExitCode
from accel_trainer.commands import (
    RunReader,
    Start,
    Stops,
    StoredCheckpoint,
    by_place,
    checkpoints_in,
    read_rows,
    recorded_starts,
    tell,
)

from ..environment import device_here, kernels_here, versions_here
from ..silent import train_silently
from . import step_digests, stop
from .proof import Proof, compare

_CALLBACKS = "ACCEL_TRAINER_CALLBACKS"
ENDED = (ExitCode.DONE, ExitCode.PREEMPTED)
"""The exit codes of a replay that has come to its last step."""
OWN_WEIGHTS = ("--init-from", "None", "--init-skip", "None")
"""For a start from a checkpoint: it has the weights, also those the run was initialised from."""

Callbacks = Mapping[str, Mapping[str, Any]]
"""Files of callbacks with their arguments, as a `Start` has them."""

STOP: Callbacks = {stop.__file__: {}}
"""They end a replay after its last step, without an evaluation."""
STEP_DIGESTS: Callbacks = {step_digests.__file__: {}}
"""They write the digests after each step into `steps.jsonl` of the replay."""


@dataclass(frozen=True)
class Trained:
    """What a replay has trained: the steps after `after` up to `until`, in `folder`."""

    run: Path
    """The folder of the run that it repeats."""
    folder: Path
    after: int
    until: int

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of the run and those of the replay of these steps."""
        mine, again = (
            read_rows(each, after=self.after, until=self.until) for each in (self.run, self.folder)
        )
        return mine, again

    def proof(self) -> Proof:
        """Return how they compare."""
        return compare(*map(by_place, self.rows()))


@dataclass(frozen=True)
class Replay:
    """How a run is trained again: what it recorded of its start, and the recipe to run."""

    run: RunReader
    start: Start
    told: set[str] = field(default_factory=set)
    """The recipes whose paths were printed."""

    @property
    def recipe(self) -> Path:
        """The file that is run."""
        return Path(self.start.recipe)

    @classmethod
    def of(cls, run: RunReader, recipe: Path | None) -> Replay:
        """Return the replay of `run` with its recorded recipe, or the one that the user names.

        Raises:
            ConfigError, OutputError: as `recorded_starts`.
        """
        return cls.of_each([run], [recipe])[0]

    @classmethod
    def of_each(cls, runs: Sequence[RunReader], recipes: Sequence[Path | None]) -> list[Replay]:
        """Return the replays of several runs, each as `of` does."""
        told: set[str] = set()
        starts = zip(runs, recorded_starts(runs, recipes), strict=True)
        return [cls(run, start, told) for run, start in starts]

    def with_flags(self, flags: Sequence[str]) -> Replay:
        """Return the replay with `flags` after the recorded ones."""
        return replace(self, start=replace(self.start, flags=[*self.start.flags, *flags]))

    def name_recipe(self) -> None:
        """Print the path of the recipe on stderr, once, as is due before it runs."""
        if self.start.recipe not in self.told:
            self.told.add(self.start.recipe)
            tell(f"note: running {self.recipe}", file=sys.stderr)

    def train(
        self,
        folder: Path,
        *,
        until: int,
        after: int,
        callbacks: Callbacks,
        may_end: Collection[int] = ENDED,
        received: Stops | None = None,
    ) -> Trained:
        """Train in the new `folder` up to step `until`.

        It begins at the newest checkpoint at or before step `after`, or at the start of the run.
        The `Start` gets the `callbacks`. What the recipe says is printed only if it fails: the
        warnings of a replay are those that the run has given. Threads that train at the same time
        share a list of signals, and each passes it as `received`.

        Raises:
            RecipeError: its exit code is not in `may_end`; it has said why.
        """
        self.name_recipe()
        place = ["--output-dir", str(folder), "--max-steps", str(until)]
        start = replace(
            self.start,
            flags=[*self.start.flags, *place, *self._origin(after), "--quiet"],
            variables={**self.start.variables, _CALLBACKS: ""},  # not those of the user
            callbacks=callbacks,
        )
        what = f"training {self.run.folder} again"
        train_silently(start, "REPLAY", what, may_end=may_end, received=received)
        return Trained(self.run.folder, folder, self.begin_after(after), until)

    def checkpoint_at(self, step: int) -> StoredCheckpoint | None:
        """Return the newest complete checkpoint of the run at or before `step`; None: no such."""
        before = (each for each in reversed(checkpoints_in(self.run.folder)) if each.step <= step)
        return next((each for each in before if each.is_complete), None)

    @property
    def begin(self) -> int:
        """The step at which the run itself began."""
        return self.run.begin

    def begin_after(self, step: int) -> int:
        """Return the step of the checkpoint at or before `step`, or the one where the run began."""
        checkpoint = self.checkpoint_at(step)
        return self.begin if checkpoint is None else checkpoint.step

    def _origin(self, after: int) -> list[str]:
        """Return the flags for a start from the newest checkpoint at or before a step, if any."""
        if (checkpoint := self.checkpoint_at(after)) is not None:
            path = str(checkpoint.path.resolve())
            return ["--resume", path, *OWN_WEIGHTS]
        return ["--resume", self.run.began_from]


def environment_changes(run: RunReader) -> list[str]:
    """Return what differs here from the run, such as `torch 2.12.0 -> 2.13.0`.

    Versions, the kernels for the processor, and the GPU are compared. With any, a replay is only
    approximate.
    """
    recorded, hardware = (
        dict(found) if isinstance(found := run.environment.get(name), Mapping) else {}
        for name in ("packages", "hardware")
    )
    before = {**recorded, "python": run.environment.get("python")}
    before["kernels for"] = hardware.get("cpu_kernels")
    here = {**versions_here(recorded), "kernels for": kernels_here()}
    if (device := hardware.get("device")) != "cpu":  # on which it trains again, whatever is here
        before["device"] = device
        here["device"] = device_here()
    return [
        f"{name} {before[name]} -> {here.get(name)}"
        for name in sorted(before)
        if before[name] != here.get(name)
    ]


def note_changes(run: RunReader) -> None:
    """Print a note on stderr if a replay is only approximate here."""
    if changes := environment_changes(run):
        text = "note: these differ from the run, so retraining is only approximate: %s"
        tell(text % ", ".join(changes), file=sys.stderr)
