"""The newest whole checkpoint is read; what is damaged is neither used nor replaced in silence."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from accel_trainer.checkpoint import format, loading
from accel_trainer.checkpoint.format import decode_files
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.cli.runs.inspect import inspect_checkpoints
from accel_trainer.core import filesystem
from accel_trainer.core.errors import CheckpointError, ExitCode
from tests.faults.mutations import rehash
from tests.faults.tiny_run import damage, is_state_at, make, name_at, names, save

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
    """Fault (Corruption): a checkpoint given by name is damaged -> an error; no different
    checkpoint is used instead
    """
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
    """Fault (Malice): a file is swapped between check and use -> the bytes that were hashed are the
    bytes that are parsed
    """
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
    """Fault (Disk): a file is visible before its content (network file systems) -> verification
    waits and retries before it reports damage
    """
    checkpointer = make(directory)
    save(checkpointer, 1)
    monkeypatch.setattr(loading, "RETRY_DELAYS_S", (0.0, 0.0))
    read, failures = filesystem.read_file, iter([True, True])

    def read_late(path: Path, *, max_bytes: int) -> bytes:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "not yet", str(path))
        return read(path, max_bytes=max_bytes)

    monkeypatch.setattr(filesystem, "read_file", read_late)
    assert load_checkpoint(checkpointer.directory) is not None


def test_another_format_is_an_error_and_not_damage(directory: Path) -> None:
    """Fault (Resume): a different checkpoint format or torch version -> a different format is an
    error; for a different version of torch, a notice is printed
    """
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
