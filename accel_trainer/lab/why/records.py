"""How two runs differ, from the files that they wrote: nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from accel_trainer.commands import (
    MUTABLE_ON_RESUME,
    Change,
    Difference,
    Rows,
    RunReader,
    StoredCheckpoint,
    by_place,
    compare_runs,
    complete_by_step,
    files_with_status,
    read_rows,
)

from ..rows import of_the_step

_WEIGHTS = "digest/model"
CHECKPOINT = "checkpoint"
# Mutable settings that change the order of sums, and so the last bits.
_ORDER_OF_SUMS = (
    "batch.per_device_batch_size",
    "batch.accumulation_steps",
    "runtime.num_threads",
    "hardware.num_threads",
    "hardware.num_processes",
)
# What is recorded for people, and decides nothing.
_FOR_PEOPLE = (
    "code.recipe",
    "code.git_commit",
    "platform",
    "hardware.num_cpus",
    # how processes reach each other
    "backend",
    "variables.GLOO_",
    "variables.OMP_",
    "variables.NCCL_DEBUG",
    "variables.TORCH_",
)
_LOGGING = ("trainer.log_every_n_steps", "trainer.digest_every_n_steps")


@dataclass(frozen=True)
class Differences:
    """What two runs recorded of themselves."""

    decisive: list[Change]
    """What decides the training: settings, code, versions, data."""
    order_of_sums: list[Change]
    """What only changes the order in which numbers are added."""
    num_equal: int
    """The number of equal settings that decide the training."""


def differences(first: RunReader, second: RunReader) -> Differences:
    """Return what may make the two runs differ."""
    groups = compare_runs(first, second)
    changes = [*groups["config"], *groups["data"], *groups["environment"]]
    ignored = [*_FOR_PEOPLE, *_LOGGING]
    if first.settings.get("batch.reduce") == "exact":  # it fixes the order of sums over processes
        ignored.append("hardware.num_processes")
    listed = [each for each in changes if not each[0].startswith(tuple(ignored))]
    order = [each for each in listed if each[0] in _ORDER_OF_SUMS]
    names = {*filter(_decides, first.settings)}
    return Differences(
        decisive=[each for each in listed if each not in order and _decides(each[0])],
        order_of_sums=order,
        num_equal=len(names - {name for name, _, _ in groups["config"]}),
    )


def _decides(name: str) -> bool:
    return not name.startswith((*MUTABLE_ON_RESUME, *_LOGGING))


def last_equal(first: Rows, second: Rows, *, before: int) -> int:
    """Return the last step before another at which both have digests of the weights; 0: none."""
    both = set(steps_with_digests(first)) & set(steps_with_digests(second))
    return max((step for step in both if step < before), default=0)


def steps_with_digests(rows: Rows) -> list[int]:
    """Return the steps at which there are digests of the weights."""
    return [step for (step, _), row in rows.items() if _WEIGHTS in row]


def rows_of_both(first: RunReader, second: RunReader, *, until: int) -> tuple[Rows, Rows]:
    """Return the rows of two runs up to step `until`, without numbers that cannot be compared.

    A training row is about the steps since the row before it. If the runs have such rows at other
    steps, only what is about the step itself is left.
    """
    one, other = (by_place(read_rows(run.folder, after=0, until=until)) for run in (first, second))
    steps = [[step for step, event in rows if event == "train"] for rows in (one, other)]
    if steps[0] == steps[1]:
        return one, other
    return of_the_step(one), of_the_step(other)


def compare_checkpoints(first: Path, second: Path) -> Iterator[tuple[int, bool]]:
    """Yield each step at which both runs have a checkpoint, and whether all tensors are equal."""
    mine, theirs = complete_by_step(first), complete_by_step(second)
    for step in sorted(mine.keys() & theirs.keys()):
        yield step, _hashes(mine[step]) == _hashes(theirs[step])


def of_checkpoints(step: int) -> Difference:
    """Return the difference of two checkpoints, of which more is not known."""
    return Difference(step, CHECKPOINT, {CHECKPOINT: "one"}, {CHECKPOINT: "other"})


def _hashes(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Return the hashes of the files with state; those of callbacks may hold times."""
    files = checkpoint.read_manifest()["files"]
    return {name: file["sha256"] for name, file in files.items() if name != "trainer.json"}


def count_tensors(checkpoint: StoredCheckpoint) -> int:
    """Return the number of tensors in a checkpoint."""
    names: set[tuple[str, str]] = set()
    for path in files_with_status(checkpoint.path):
        if path.suffix != ".safetensors":
            continue
        piece = path.relative_to(checkpoint.path).parts[0]
        with safe_open(path, "np") as file:
            names |= {(piece, name) for name in file.keys()}  # noqa: SIM118  # not iterable
    return len(names)
