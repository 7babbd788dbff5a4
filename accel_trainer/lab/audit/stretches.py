"""Trains stretches of a run again, and compares their rows and the checkpoints at their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from accel_trainer import ExitCode
from accel_trainer.commands import (
    Difference,
    LoadedCheckpoint,
    StoredCheckpoint,
    by_place,
    checkpoints_in,
    epoch_permutation,
    first_difference,
    read_rows,
)

from ..replay.replay import Replay
from ..replay.stretches import Stretch
from ..rows import SINCE_LAST_ROW
from ..silent import RecipeError
from .evidence import Evidence, step_named
from .verdict import Found, judge

# What decides the bits of a stretch; a resume may change everything else.
_SAME = ("settings", "data_fingerprint", "order", "num_processes", "num_threads", "versions")

# How a recipe ends if what is here does not fit the run. Other errors, such as missing data, only
# mean that nothing could be compared.
_DOES_NOT_FIT = (ExitCode.USAGE, ExitCode.CHECKPOINT, ExitCode.DIVERGED)

# A run of hours is stopped and saved before its last evaluation; its replay ends by its steps.
_AT_ITS_END = ("requested_stop", "evaluated_step", "metrics", "best")

_SAMPLES = "digest/samples_so_far"


def find_stretches(evidence: Evidence) -> list[Stretch]:
    """Return the stretches between kept checkpoints, and from the start of the run to the first.

    Stretches are left out if they were trained with different settings, data, versions or numbers
    of processes and threads than the end of the run.
    """
    manifests = evidence.manifests
    if evidence.newest is None:
        return []
    last = _deciding(manifests[evidence.newest])
    alike = [*takewhile(lambda name: _deciding(manifests[name]) == last, reversed(manifests))]
    points = sorted({*map(step_named, alike)})
    counts = {row.get("num_processes") for row in evidence.run.attempts if row["event"] == "start"}
    is_whole = len(alike) == len(manifests) and len(counts) <= 1
    if is_whole and (first := _first_step(evidence)) is not None:
        points = [first, *points]
    return [Stretch(start, end) for start, end in pairwise(points) if start < end]


def _deciding(manifest: Mapping[str, Any]) -> list[Any]:
    return [manifest.get(name) for name in _SAME]


def _first_step(evidence: Evidence) -> int | None:
    """Return the step at which the run began, None if what it began with is not there."""
    origin = evidence.run.settings.get("run.resume", "auto")
    init_from = evidence.run.settings.get("run.init_from")
    if origin in ("auto", "never"):
        return 0 if init_from is None or Path(str(init_from)).expanduser().exists() else None
    found = StoredCheckpoint.of(Path(str(origin)).expanduser())
    # The run that it came from may have removed this checkpoint since.
    return found.step if found is not None and found.is_complete else None


def choose(
    stretches: Sequence[Stretch], *, count: int, seed: int, max_steps: int | None
) -> list[Stretch]:
    """Return `count` stretches drawn from `seed`, in their order, perhaps cut short."""
    order = epoch_permutation(len(stretches), seed=seed, epoch=0)
    drawn = [stretches[index] for index in sorted(order[:count].tolist())]
    if max_steps is None:
        return drawn
    return [Stretch(each.after, min(each.until, each.after + max_steps)) for each in drawn]


def check_stretch(
    evidence: Evidence, replay: Replay, stretch: Stretch, folder: Path, *, doubts: Sequence[str]
) -> Found:
    """Train a stretch again in the new `folder` and compare it.

    `doubts` are reasons for which the bits may differ: a difference then proves nothing.
    """
    start = replay.checkpoint_at(stretch.after)
    try:
        replay.with_flags(["--trainer.max-time-s", "None"]).train_silently(
            folder, until=stretch.until, after=stretch.after, callbacks={}
        )
    except RecipeError as error:
        # A run that still trains may have removed the checkpoint.
        is_there = start is None or start.is_complete
        is_proof = error.exit_code in _DOES_NOT_FIT and is_there and not doubts
        return "DIFFERS" if is_proof else "not checked", error.message
    differences = [_compare_rows(evidence.run.folder, folder, stretch)]
    compared = "their rows"
    at_end = [name for name in evidence.manifests if step_named(name) == stretch.until]
    if at_end:  # otherwise, it is cut short
        name = at_end[-1]
        differences.append(_compare_checkpoints(evidence, evidence.load(name), folder))
        compared = f"their rows and all tensors of {name}"
    difference = "; ".join(filter(None, differences)) or None
    if difference is not None and doubts:
        return "not checked", f"only approximate here ({', '.join(doubts)}): {difference}"
    return judge(difference, compared=f"trained again: {compared}")


def _compare_rows(run: Path, folder: Path, stretch: Stretch) -> str | None:
    """Return the first number, or row, that differs."""
    mine, again = (
        by_place(
            read_rows(each, after=stretch.after, until=stretch.until, left_out=(SINCE_LAST_ROW,))
        )
        for each in (run, folder)
    )
    # A replay evaluates the end of its stretch; the run went on and may not have.
    again = {place: again[place] for place in again if place in mine or place[0] < stretch.until}
    found = Difference.of(mine, again)
    if found is None:
        return None
    if not found.one:
        return f"the run has no {found.event} row of step {found.step}"
    if not found.other:
        return f"training again gives no {found.event} row of step {found.step}"
    name = _SAMPLES if _SAMPLES in found.names else found.names[0]
    values = "{} in the run, {} trained again".format(*found.values(name))
    fact = f"the {found.event} row of step {found.step}: {name} is {values}"
    is_same = name != _SAMPLES and _SAMPLES in found.one
    return fact + ", for samples with the same indices" * is_same


def _compare_checkpoints(evidence: Evidence, one: LoadedCheckpoint, folder: Path) -> str | None:
    """Return the first tensor or value of a checkpoint that differs from the one trained again."""
    found = {each.name: each for each in checkpoints_in(folder)}
    if one.name not in found:
        return f"training again gives no {one.name}"
    other = found[one.name].read()
    settings = [evidence.settings_of(each.manifest) for each in (one, other)]
    if difference := first_difference(*settings):
        return f"{one.name}: the settings differ in {difference}"
    for name in ("data_fingerprint", "order", "task_fingerprint"):
        if one.manifest.get(name) != other.manifest.get(name):
            return f"{one.name}: {name} is {one.manifest.get(name)}, not {other.manifest[name]}"
    for piece in dict.fromkeys([*one.pieces, *other.pieces]):
        states = [{**each.pieces.get(piece, {})} for each in (one, other)]
        if piece == "trainer":
            for state in states:
                state.pop("callbacks", None)  # the length of the rows, which have times
                for name in _AT_ITS_END if evidence.run.decided else ():
                    state.pop(name, None)
        difference = first_difference(*states)
        if difference is not None:
            return f"{one.name}: {piece}: {difference}"
    return None
