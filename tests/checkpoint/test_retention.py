from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from accel_trainer.checkpoint import format, retention
from accel_trainer.checkpoint.format import decode_files
from accel_trainer.checkpoint.retention import best_name, load_checkpoint, update_best
from accel_trainer.cli.runs.inspect import inspect_checkpoints
from accel_trainer.core import filesystem
from accel_trainer.core.errors import CheckpointError, ExitCode
from accel_trainer.core.train_state import BestCheckpoint
from tests.faults.mutations import rehash
from tests.faults.tiny_run import METADATA, damage, is_state_at, make, name_at, names, save

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


def test_checkpoints_after_the_one_resumed_from_are_quarantined(directory: Path) -> None:
    save(make(directory), 1, 2)
    checkpointer = make(directory, METADATA | {"settings": {"seed": 1}})
    assert load_checkpoint(checkpointer.directory, name_at(1)) is not None
    save(checkpointer, 1)
    loaded = load_checkpoint(checkpointer.directory)
    assert loaded is not None
    assert loaded.name == name_at(1)
    assert f"superseded-{name_at(2)}" in names(directory)


# --- damage ---


def test_a_damaged_newest_checkpoint_is_skipped_and_quarantined_by_a_save(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    damage(directory, 2)
    with caplog.at_level(logging.WARNING):
        loaded = load_checkpoint(checkpointer.directory)
    assert loaded is not None
    assert loaded.name == name_at(1)
    assert (
        f"{name_at(2)}/model.safetensors: its sha256 is not the one in the manifest" in caplog.text
    )
    assert names(directory) == [name_at(1), name_at(2)]
    save(make(directory), 2)
    assert names(directory) == [f"damaged-{name_at(2)}", name_at(1), name_at(2)]


def test_if_all_checkpoints_are_damaged_no_try_starts_from_scratch(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    damage(directory, 1)
    damage(directory, 2)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="CKPT_NONE_VALID") as raised:
            load_checkpoint(checkpointer.directory)
        assert raised.value.exit_code == ExitCode.CHECKPOINT
    assert names(directory) == [name_at(1), name_at(2)]


def test_a_folder_with_only_a_quarantined_checkpoint_is_not_empty(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    (directory / name_at(2)).rename(directory / f"damaged-{name_at(2)}")
    shutil.rmtree(directory / name_at(1))
    with pytest.raises(CheckpointError, match="CKPT_NONE_VALID"):
        load_checkpoint(checkpointer.directory)


def test_a_damaged_checkpoint_given_by_name_is_an_error_without_fallback(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    damage(directory, 2)
    with pytest.raises(CheckpointError, match=rf"CKPT_DAMAGED.*{name_at(2)}/model\.safetensors"):
        load_checkpoint(checkpointer.directory, name_at(2))
    with pytest.raises(CheckpointError, match=f"CKPT_NOT_FOUND.*there are .*{name_at(1)}"):
        load_checkpoint(checkpointer.directory, name_at(7))
    with pytest.raises(CheckpointError, match="CKPT_NOT_FOUND"):
        load_checkpoint(checkpointer.directory, "../checkpoints")
    assert names(directory) == [name_at(1), name_at(2)]


def test_a_copy_under_another_position_is_damaged(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    shutil.copytree(directory / name_at(1), directory / name_at(5))
    with pytest.raises(CheckpointError, match=f"CKPT_DAMAGED.*it belongs to {name_at(1)}"):
        load_checkpoint(checkpointer.directory, name_at(5))


def test_a_symlink_to_a_checkpoint_is_refused_and_an_extra_file_ignored(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    (directory / name_at(1) / "notes.txt").write_text("mine")
    assert load_checkpoint(checkpointer.directory) is not None
    (directory / name_at(2)).symlink_to(name_at(1))
    with pytest.raises(CheckpointError, match="CKPT_DAMAGED.*not a directory"):
        load_checkpoint(checkpointer.directory, name_at(2))


def test_the_bytes_that_were_verified_are_the_bytes_that_are_parsed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    read = filesystem.read_file

    def read_and_swap(path: Path, *, max_bytes: int) -> bytes:
        data = read(path, max_bytes=max_bytes)
        path.write_bytes(b"swapped after it was read")
        return data

    monkeypatch.setattr(filesystem, "read_file", read_and_swap)
    loaded = decode_files(format.read_files(directory / name_at(1)), directory / name_at(1))
    assert is_state_at(loaded.pieces, 1)


def test_a_name_that_shows_before_its_content_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    monkeypatch.setattr(retention, "RETRY_DELAYS_S", (0.0, 0.0))
    read, failures = filesystem.read_file, iter([True, True])

    def read_late(path: Path, *, max_bytes: int) -> bytes:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "not yet", str(path))
        return read(path, max_bytes=max_bytes)

    monkeypatch.setattr(filesystem, "read_file", read_late)
    assert load_checkpoint(checkpointer.directory) is not None


def test_another_format_is_an_error_and_not_damage(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    files = format.read_files(directory / name_at(2))
    rehash(files, lambda manifest: manifest.update(format=2))
    for name, data in files.items():
        (directory / name_at(2) / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="CKPT_FORMAT.*has format 2, this version reads 1"):
        load_checkpoint(checkpointer.directory)


# --- what people see ---


def test_a_report_shows_each_file_and_which_would_be_used(directory: Path) -> None:
    save(make(directory), 1, 2)
    damage(directory, 2)
    (first, second), used = inspect_checkpoints(directory)
    assert used == first.name == name_at(1)
    assert first.problem is None
    assert first.manifest["optimizer_step"] == 1
    assert "sha256" in str(second.problem)
    assert [name for name, problem in second.problems.items() if problem is not None] == [
        "model.safetensors"
    ]
    assert len(second.problems) == 8
    shutil.rmtree(directory / name_at(2))
    (directory / name_at(2)).mkdir()
    assert "COMMIT: No such file" in str(inspect_checkpoints(directory)[0][1].problem)


def test_a_forged_checkpoint_that_would_fill_the_memory_is_passed_over(directory: Path) -> None:
    size = 2**40
    save(make(directory), 1, 2)
    folder = directory / name_at(2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    rehash(files, lambda manifest: manifest["files"]["model.safetensors"].update(bytes=size))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.truncate(folder / "model.safetensors", size)
    found = load_checkpoint(directory)
    assert found is not None
    assert found.name == name_at(1)


def test_a_link_in_place_of_the_folder_is_not_followed(directory: Path) -> None:
    save(make(directory), 1, 2)
    link = directory.with_name("link")
    link.symlink_to(directory)
    with pytest.raises(CheckpointError, match="is a link"):
        load_checkpoint(link)
