"""Trains stretches of a run again, with more callbacks, and compares them with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer import OutputError
from accel_trainer.commands import Stops, available_cpus, by_place, checkpoints_in, filesystem

from ..rows import of_the_step
from .proof import compare
from .replay import STOP, Callbacks, Replay, environment_changes
from .stretches import Logged, Stretch, latest_start

_LOG_EVERY = "trainer.log_every_n_steps"
# A replay needs no old checkpoints, and ends where the run did.
_FLAGS = (
    *("--checkpoint.keep-for-replay", "0"),
    *("--checkpoint.keep-every-n-steps", "None"),
    *("--trainer.max-time-s", "None"),
)


@dataclass(frozen=True)
class Again:
    """How a run is trained again: with `callbacks`, and with a row each `every` steps."""

    replay: Replay
    callbacks: Sequence[Path]
    every: int

    def train(self, stretch: Stretch, folder: Path, received: Stops | None = None) -> Logged:
        """Train a stretch in the new `folder`; `received` is for `Replay.train`.

        Raises:
            OutputError: the recipe failed, or something ended it before the stretch did.
        """
        own: Callbacks = {str(path): {} for path in self.callbacks}
        trained = self.replay.with_flags([*_FLAGS, *self._interval_flags()]).train(
            folder,
            until=stretch.until,
            after=latest_start(self.replay, stretch),
            callbacks=own if stretch.is_end else {**own, **STOP},
            received=received,
        )
        ended = max((each.step for each in checkpoints_in(folder)), default=0)
        if ended != stretch.until:
            fact = f"training again ended after step {ended}, and not after {stretch.until}"
            raise OutputError("REPLAY", f"{fact}: a callback or a signal has stopped it")
        mine, rows = trained.rows()
        recorded, again = by_place(mine), by_place(rows)
        if self.every != interval_of(self.replay):
            known = of_the_step(recorded)
            recorded = {place: known[place] for place in known if place in again and known[place]}
        kept = [row for row in rows if row["optimizer_step"] > stretch.after]
        return Logged(stretch, kept, compare(recorded, again))

    def _interval_flags(self) -> list[str]:
        """Return the flags that change the interval of rows; none if it is the run's."""
        if self.every == interval_of(self.replay):
            return []
        allowed = [*(self.replay.run.settings.get("run.allow_change") or []), _LOG_EVERY]
        return ["--trainer.log-every-n-steps", str(self.every), "--allow-change", *allowed]

    def key(self) -> str:
        """Return a hash of what decides the rows: the files that are run, settings, versions."""
        replay = self.replay
        files = [*self.callbacks, replay.recipe, replay.run.folder / "config.yaml"]
        hashes = [filesystem.sha256_of(file) for file in files]
        deciding = json.dumps([hashes, self.every, environment_changes(replay.run)])
        return hashlib.sha256(deciding.encode()).hexdigest()[:16]


def default_jobs(replay: Replay, num_stretches: int) -> int:
    """Return how many stretches to train at once: one on a GPU, else as many as the cores allow."""
    hardware = replay.run.environment["hardware"]
    if hardware["device"] != "cpu":
        return 1
    cores = replay.start.num_processes * int(hardware["num_threads"])
    return max(1, min(num_stretches, available_cpus() // cores))


def interval_of(replay: Replay) -> int:
    """Return how many steps lie between two rows of the run."""
    return int(replay.run.settings[_LOG_EVERY])
