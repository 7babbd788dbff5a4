"""Trains a run again with some values of another run, and keeps what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import yaml

from accel_trainer import OutputError
from accel_trainer.commands import (
    Difference,
    Rows,
    at_both,
    by_place,
    filesystem,
    flags_with,
    read_rows,
    scratch_folder,
    train_at_once,
)

from ..replay.replay import STEP_DIGESTS, STOP, Replay
from ..rows import read_digests
from ..silent import read_said
from . import rates


@dataclass(frozen=True)
class Trial:
    """What came of a training, as far as trainings are compared."""

    steps: Rows
    """Digests of the parts of a checkpoint and of the samples after each step, and the numbers of
    an evaluation there."""
    rates: Rows
    """The learning rates of all steps of the run, also of those that were not trained."""
    end: int
    """The last step that the whole run would train."""
    error: str | None
    """The last line that the training printed if it failed."""

    @property
    def refused(self) -> str | None:
        """Why no step was trained, None if one was."""
        return None if self.steps else self.error or "it trained no step"


def first_difference(one: Trial, other: Trial) -> Difference | None:
    """Return where the results of two trials begin to differ; None: nowhere.

    Learning rates are compared for all steps of the run.
    """
    if one == other:
        return None
    found = [
        Difference.of(*at_both(one.steps, other.steps)),
        Difference.of(*at_both(one.rates, other.rates)),
    ]
    if one.error != other.error:
        last = max((step for step, _ in one.steps.keys() & other.steps.keys()), default=0)
        text = one.error or other.error or ""
        found.append(Difference(last + 1, "error", {text: one.error}, {text: other.error}))
    elif one.end != other.end:
        ends = ({"the last step": each.end} for each in (one, other))
        found.append(Difference(min(one.end, other.end) + 1, "end", *ends))
    return min(filter(None, found), key=lambda each: each.step, default=None)


@dataclass(frozen=True)
class Trials:
    """Trains a stretch of a run again with sets of the values of another run, each set once.

    `values` are these by dotted name; a name without a value there is left out of the
    config. The stretch goes from the newest checkpoint at or before step `after` to step `until`.
    At most `num_jobs` trainings run at once.
    """

    replay: Replay
    values: Mapping[str, Any]
    after: int
    until: int
    num_jobs: int
    known: dict[frozenset[str], Trial] = field(default_factory=dict)
    """What came of the sets that were trained."""

    def __call__(self, sets: Sequence[frozenset[str]]) -> list[Trial]:
        """Return what came of each set of other values.

        Raises:
            KeyboardInterrupt: a signal to stop came.
        """
        new = [each for each in dict.fromkeys(sets) if each not in self.known]
        with scratch_folder("effect") as folder:
            self.known.update(train_at_once(partial(self._train, folder), new, jobs=self.num_jobs))
        return [self.known[each] for each in sets]

    @property
    def begin(self) -> int:
        """The step at which the stretch begins."""
        return self.replay.begin_after(self.after)

    @property
    def num_steps(self) -> int:
        """The steps that were trained so far."""
        return sum(len(trial.steps) for trial in self.known.values())

    def elsewhere(self, *, after: int, until: int) -> Trials:
        """Return trials of another stretch of the same run."""
        return replace(self, after=after, until=until, known={})

    def _train(self, place: Path, names: frozenset[str], received: list[int]) -> Trial:
        config = mixed(self.replay.run.config, self.values, names)
        error = None
        with TemporaryDirectory(dir=place) as temporary, TemporaryFile() as errors:
            folder = Path(temporary, "run")
            try:
                self._with(config, names, folder.with_name("config.yaml")).train(
                    folder,
                    until=self.until,
                    after=self.after,
                    callbacks={**STEP_DIGESTS, rates.__file__: {}, **STOP},
                    errors=errors,
                    received=received,
                )
            except OutputError:
                error = read_said(errors).rpartition("\n")[2] or "it failed"
            found = _rates_in(folder)
            return Trial(
                steps=_steps_in(folder),
                rates={place: found[place] for place in found if place[0] > self.replay.begin},
                end=min(len(found), config["trainer"].get("max_steps") or len(found)),
                error=error,
            )

    def _with(self, config: Mapping[str, Any], names: frozenset[str], path: Path) -> Replay:
        """Return the replay with `config`, in which `names` have changed, written to `path`."""
        hardware = self.replay.run.environment["hardware"]
        threads = (config.get("runtime") or {}).get("num_threads") or hardware["num_threads"]
        filesystem.write_file_atomic(path, yaml.safe_dump(config, sort_keys=False).encode())
        flags = flags_with(path, num_threads=threads)
        if names and self.begin:  # a resume, or a branch of a different run
            flags += ["--allow-change", *sorted(names)]
        return replace(self.replay, start=replace(self.replay.start, flags=flags))


def mixed(
    config: Mapping[str, Any], values: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    """Return `config` with the `values` of `names`, without those that have none there."""
    mixture: dict[str, Any] = json.loads(json.dumps(config))
    for name in names:
        *groups, last = name.split(".")
        group = mixture
        for each in groups:
            group = group.setdefault(each, {})
        group.pop(last, None)
        if name in values:
            group[last] = values[name]
    return mixture


def _steps_in(folder: Path) -> Rows:
    """Return what a training has written after each step; empty if it trained none."""
    steps = {place: {**row} for place, row in read_digests(folder).items()}
    rows = by_place(read_rows(folder)) if steps else {}
    for (step, event), row in rows.items():
        if event == "eval" and (step, "step") in steps:
            steps[step, "step"]["evaluation"] = row
    return steps


def _rates_in(folder: Path) -> Rows:
    path = folder / "rates.json"
    rates = json.loads(b"".join(filesystem.read_chunks(path))) if path.is_file() else []
    return {(step, "rate"): {"learning rate": rate} for step, rate in enumerate(rates, start=1)}
