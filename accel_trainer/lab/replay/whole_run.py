"""Trains a whole past run again, with callbacks that it did not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from accel_trainer import Callback, ConfigError, UserError
from accel_trainer.commands import (
    CommandParser,
    Row,
    RunReader,
    Say,
    Stops,
    callbacks_in,
    counted,
    last_step,
    train_at_once,
)

from ..kept import kept_folder
from .again import Again, default_jobs, interval_of
from .proof import Proof
from .replay import Replay, environment_changes, note_changes
from .store import Store
from .stretches import Logged, Stretch, num_steps, plan


def add_job_options(parser: CommandParser) -> None:
    """Add the flags of commands that train a whole run again."""
    jobs_help = "segments to train at once; default: as many as the cores allow, 1 on a GPU"
    parser.add_number("--jobs", jobs_help, lowest=1)
    parser.add_path("--keep", "FOLDER", "keep the replays in this new folder")


@dataclass(frozen=True)
class Retrained:
    """What was trained again: all its rows, in the order of their steps."""

    rows: Sequence[Row]
    proof: Proof
    num_steps: int
    """Steps that were trained now; the others were stored."""
    folder: Path


def train_again(
    replay: Replay,
    *,
    callbacks: Sequence[Path],
    every: int | None,
    folder: Path,
    first: int | None = None,
    last: int | None = None,
    jobs: int | None = None,
    keep: Path | None = None,
    say: Say,
) -> Retrained:
    """Train the steps of a run from `first` to `last` again, and return their rows.

    `every` is the interval of rows (None: that of the run). Finished stretches are stored in
    `folder`; what is there is not trained again. `say` is called with lines about the progress.

    Raises:
        ConfigError: there are no such steps, or a file has no callbacks.
        OutputError: the recipe failed, or a folder cannot be written.
        KeyboardInterrupt: a stop signal came.
    """
    _check_steps(replay, first, last)
    interval = every or interval_of(replay)
    in_one = any([has_state(path) for path in callbacks])
    stretches = plan(replay, every=interval, first=first or 1, last=last, in_one=in_one)
    again = Again(replay, [path.resolve() for path in callbacks], interval)
    is_approximate = bool(environment_changes(replay.run))
    with kept_folder(keep) as replays:
        store = Store(folder, again.key())
        store.begin()
        missing = []
        for stretch in stretches:
            stored = store.get(stretch)
            # A difference may come from outside the run, and be gone this time.
            if stored is None or (stored.proof.first_difference and not is_approximate):
                missing.append(stretch)
        jobs = jobs or default_jobs(replay, len(missing))
        steps = sum(num_steps(replay, each) for each in missing)
        names = "".join(f" with {path.name}" for path in callbacks)
        say(f"{replay.run.name}{names}: {_intention(stretches, missing, steps=steps, jobs=jobs)}")
        if missing:
            note_changes(replay.run)

        def train(stretch: Stretch, received: Stops) -> Logged:
            place = replays / f"steps-{stretch.after + 1}-{stretch.until}"
            logged = again.train(stretch, place, received)
            store.put(logged, place)  # at once, so that it is kept if a later one fails
            return logged

        for stretch, logged in train_at_once(train, missing, jobs=jobs):
            say(f"steps {stretch.after + 1} to {stretch.until}: {logged.proof}")
    trained = [*filter(None, map(store.get, stretches))]
    rows = [row for each in trained for row in each.rows]
    kept = [row for row in rows if row["optimizer_step"] >= (first or 1)]
    return Retrained(kept, reduce(add, [each.proof for each in trained]), steps, store.folder)


def _check_steps(replay: Replay, first: int | None, last: int | None) -> None:
    low, end = replay.begin + 1, last_step(replay.run)
    begin, until = low if first is None else first, end if last is None else last
    if not low <= begin <= until <= end:
        asked = f"steps {begin} to {until}"
        fix = f"give steps from {low} to {end}" if low <= end else "it has not trained yet"
        raise ConfigError("STEP", f"{replay.run.folder} has no {asked}: {fix}")


def has_state(path: Path) -> bool:
    """Whether callbacks of a file keep something from step to step. Raises ConfigError."""
    try:
        callbacks = callbacks_in(str(path))
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("CALLBACKS", f"{path} cannot be run ({reason}): correct it") from error
    return any(type(each).state_dict is not Callback.state_dict for each in callbacks)


def folder_beside(run: RunReader, name: str) -> Path:
    """Return the folder beside the run in which what is trained again is stored."""
    folder = run.folder.resolve()
    return folder.with_name(f"{folder.name}-{name}")


def _intention(
    stretches: Sequence[Stretch], missing: Sequence[Stretch], *, steps: int, jobs: int
) -> str:
    if not missing:
        return f"all {len(stretches)} segments are stored"
    stored = len(stretches) - len(missing)
    parts = counted(len(missing), "segment")
    at_once = f", {min(jobs, len(missing))} at a time" if len(missing) > 1 else ""
    rest = f"; {stored} stored" if stored else ""
    return f"training {counted(steps, 'step')} again, in {parts}{at_once}{rest}"
