"""An ending of a trunk: a branch beside it, which decays from one of its steps to a finished model.

It has the bits of a run that was planned to decay there: until the decay, what a trunk trains does
not depend on its length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_trainer import ConfigError, OutputError, ScheduleConfig
from accel_trainer.commands import (
    MUTABLE_ON_RESUME,
    RunReader,
    by_place,
    compare_runs,
    complete_by_step,
    read_rows,
    read_run,
    train_recipe,
)

from ..replay.at import check_step, copy_checkpoint, made
from ..replay.proof import Proof, compare
from ..replay.replay import OWN_WEIGHTS, STOP, Replay
from ..silent import RecipeError

_NAME = re.compile(r"-finish-(?P<at>\d+)-(?P<end>\d+)")
# What an ending changes: it lasts for some steps, and nothing else ends it.
_CHANGED = (
    "schedule.decay_at",
    "trainer.hours",
    "trainer.num_epochs",
    "trainer.num_steps",
)
_FLAGS = (
    *("--epochs", "None"),
    *("--max-steps", "None"),
    *("--trainer.max-time-s", "None"),
    *OWN_WEIGHTS,
)


@dataclass(frozen=True)
class Ending:
    """The branch that leaves `trunk` after step `at`, and decays until step `end`."""

    trunk: RunReader
    at: int
    end: int

    @property
    def folder(self) -> Path:
        """The folder of the branch, beside the trunk."""
        trunk = self.trunk.folder.resolve()
        return trunk.with_name(f"{trunk.name}-finish-{self.at}-{self.end}")

    @property
    def is_done(self) -> bool:
        """Whether it was trained to its end."""
        return self.is_begun and read_run(self.folder).result.get("state") == "done"

    @property
    def is_begun(self) -> bool:
        """Whether it has a checkpoint: what continues from it needs the trunk no longer."""
        return bool(complete_by_step(self.folder))

    def check(self) -> None:
        """Raise ConfigError if the trunk has no such ending."""
        check_step(self.trunk, self.at)
        settings = self.trunk.settings
        name = self.trunk.folder
        if (decay_at := settings.get("schedule.decay_at")) is not None and self.at > decay_at:
            fact = f"{name} decays after step {decay_at}, but --at is {self.at}"
            raise ConfigError("FINISH", f"{fact}: give a step up to {decay_at}")
        schedule = ScheduleConfig(
            shape="trunk",
            warmup_epochs=settings["schedule.warmup_epochs"],
            warmup_steps=settings.get("schedule.warmup_steps", 0),
        )
        warmup = schedule.num_warmup_steps(
            total_steps=self.end, steps_per_epoch=self.trunk.steps_per_epoch or 0
        )
        if self.at < warmup:
            fact = f"{name} warms up until step {warmup}, but --at is {self.at}"
            raise ConfigError("FINISH", f"{fact}: give a step from {warmup} on")

    def check_origin(self) -> None:
        """Raise OutputError if the branch that is there has left a different trunk.

        The trunk may have been trained again with other settings, code or data.
        """
        branch = read_run(self.folder)
        changes = compare_runs(self.trunk, branch)
        differing = [name for name, _, _ in changes["config"] if name not in _CHANGED]
        found = [name for name in differing if not name.startswith(MUTABLE_ON_RESUME)]
        found += [name for name, _, _ in changes["data"]]
        proof = compare(
            *(by_place(read_rows(each.folder, until=self.at)) for each in (self.trunk, branch))
        )
        if proof.first_difference is not None:
            found.append(proof.first_difference)
        if found:
            fact = f"{self.folder} branched off a different {self.trunk.name} ({found[0]})"
            raise OutputError("FINISH", f"{fact}: move it away, and run the command again")

    def begin(self, replay: Replay) -> Proof | None:
        """Make the folder of the branch, with the checkpoint of step `at`.

        If the trunk does not have that any more, the steps since the one before are trained again;
        their comparison with the rows of the trunk is returned.

        Raises:
            OutputError: the folder is not empty, or the trunk could not be repeated.
        """
        kept = complete_by_step(self.trunk.folder).get(self.at)
        with made(self.folder) as folder:
            if kept is not None:
                copy_checkpoint(self.trunk, kept, folder)
                return None
            again = replay.train(folder, until=self.at, after=self.at - 1, callbacks=STOP)
            proof = again.proof()
            if proof.first_difference is not None:
                fact = f"the steps up to {self.at} could not be repeated: {proof}"
                raise OutputError("REPLAY", f"{fact}: give a step that has a checkpoint")
            return proof

    def train(self, replay: Replay) -> None:
        """Train the branch from its newest checkpoint to its end.

        Raises:
            RecipeError: the recipe failed or was stopped; it has said why.
        """
        replay.name_recipe()
        if code := train_recipe(replay.with_flags(self._flags()).start):
            fact = f"{self.folder.name} ended with exit code {code}"
            raise RecipeError("FINISH", f"{fact}: run the same command again to continue it", code)

    def _flags(self) -> list[str]:
        return [
            *_FLAGS,
            *("--output-dir", str(self.folder)),
            *("--resume", "auto"),
            *("--steps", str(self.end)),
            *("--schedule.decay-at", str(self.at)),
            *("--allow-change", *(self.trunk.settings.get("run.allow_change") or []), *_CHANGED),
        ]


def check_trunk(run: RunReader) -> None:
    """Raise ConfigError if the learning rate of `run` depends on where it ends."""
    shape = run.settings.get("schedule.shape")
    if shape != "trunk":
        raise ConfigError(
            "FINISH",
            f"{run.folder} was trained with --schedule.shape {shape}, which already decays towards "
            "its own end: train a run with --schedule.shape trunk, and finish that",
        )


def endings_of(trunk: RunReader) -> list[Ending]:
    """Return the endings beside a trunk that have begun, those of fewer steps first."""
    own = trunk.folder.resolve()
    found = [
        Ending(trunk, int(match["at"]), int(match["end"]))
        for each in own.parent.glob(f"{own.name}-finish-*")
        if (match := _NAME.fullmatch(each.name.removeprefix(own.name)))
    ]
    begun = (each for each in found if each.is_begun)
    return sorted(begun, key=lambda each: (each.end, each.at))
