from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from accel_trainer.checkpoint import format, retention
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.retention import best_name, update_best
from accel_trainer.core.train_state import BestCheckpoint
from tests.faults.tiny_run import METADATA, make, name_at, names, save

# --- retention ---


def test_the_last_the_best_and_the_permanent_are_kept(directory: Path) -> None:
    checkpointer = make(directory, keep_every_n_steps=5)
    best = BestCheckpoint(name_at(3), "accuracy", 0.9)
    for step in range(1, 13):
        save(checkpointer, step, best=best if step >= 3 else None)
    kept = [name_at(step) for step in (3, 5, 10, 11, 12)]
    assert names(directory) == ["best.json", *kept]
    assert json.loads((directory / "best.json").read_bytes()) == {
        "name": name_at(3),
        "metric": "accuracy",
        "value": 0.9,
        "mode": "max",
    }


def test_older_checkpoints_are_kept_for_replays_and_evenly_spread(directory: Path) -> None:
    checkpointer = make(directory, keep_for_replay=4)
    for step in range(1, 41):
        save(checkpointer, step)
        steps = [0, *map(format.step_of, format.list_checkpoints(directory))]
        assert len(steps) <= 1 + 4 + 2
        gaps = [after - before for before, after in pairwise(steps)]
        assert max(gaps) <= 1 + 2 * step / 5, steps
    assert {39, 40} <= set(steps)


def test_the_old_best_goes_once_there_is_a_better_one(directory: Path) -> None:
    checkpointer = make(directory)
    for step in range(1, 7):
        save(
            checkpointer, step, best=BestCheckpoint(name_at(1 if step < 4 else 4), "accuracy", 0.1)
        )
    assert names(directory) == ["best.json", name_at(4), name_at(5), name_at(6)]


def test_a_best_that_was_never_saved_does_not_replace_the_old_one(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, best=BestCheckpoint(name_at(1), "accuracy", 0.1))
    save(checkpointer, 3, 4, 5, best=BestCheckpoint(name_at(2), "accuracy", 0.2))
    assert best_name(directory) == name_at(1)
    assert (directory / name_at(1)).exists()


def test_a_crash_before_the_best_was_named_is_repaired_on_resume(directory: Path) -> None:
    """Fault (Crash during a save): crash between the commit and `best.json` -> repaired at the next
    start from the checkpoint's own state
    """
    save(make(directory), 1)  # the best, by its trainer state, but nothing names it
    checkpointer = make(directory)
    update_best(checkpointer.directory, BestCheckpoint(name_at(1), "accuracy", 0.5))
    assert best_name(directory) == name_at(1)


def test_nothing_that_is_not_a_whole_checkpoint_of_ours_is_deleted(directory: Path) -> None:
    checkpointer = make(directory)
    (directory / "notes.txt").touch()
    (directory / "step-1").mkdir()
    (directory / name_at(1)).mkdir()  # named like ours, without our mark
    (directory / name_at(1) / "thesis.tex").touch()
    (directory / "damaged-step-0000000000-epoch-00000").mkdir()
    save(checkpointer, 2, 3, 4, 5)
    expected = [
        "damaged-step-0000000000-epoch-00000",
        "notes.txt",
        "step-1",
        name_at(1),
        name_at(4),
        name_at(5),
    ]
    assert names(directory) == sorted(expected)


def test_retention_keeps_a_checkpoint_that_was_copied_into_a_run(directory: Path) -> None:
    save(make(directory.with_name("other")), 1)
    checkpointer = make(directory)
    shutil.copytree(directory.with_name("other") / name_at(1), directory / name_at(1))
    checkpointer.check_room({})  # which decides nothing about who owns what
    save(checkpointer, 2, 3, 4)
    assert names(directory) == [name_at(1), name_at(3), name_at(4)]


def test_a_checkpoint_that_vanishes_while_old_ones_go_ends_no_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)

    def vanishing(path: Path) -> bool:
        is_whole = format.is_committed(path)
        if path.name == name_at(1):
            path.rename(directory.parent / "taken")
        return is_whole

    monkeypatch.setattr(retention, "is_committed", vanishing)
    save(checkpointer, 3)
    assert names(directory) == [name_at(2), name_at(3)]


def test_checkpoints_after_the_one_resumed_from_are_quarantined(directory: Path) -> None:
    save(make(directory), 1, 2)
    checkpointer = make(directory, METADATA | {"settings": {"seed": 1}})
    assert load_checkpoint(checkpointer.directory, name_at(1)) is not None
    save(checkpointer, 1)
    loaded = load_checkpoint(checkpointer.directory)
    assert loaded is not None
    assert loaded.name == name_at(1)
    assert f"superseded-{name_at(2)}" in names(directory)
