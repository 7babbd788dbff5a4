from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from accel_trainer.checkpoint.format import (
    COMMIT,
    MANIFEST,
    commit_mark,
    decode_files,
    is_committed,
    list_checkpoints,
    read_files,
    read_manifest,
    write_checkpoint,
)
from accel_trainer.checkpoint.serialization import encode
from accel_trainer.core.errors import CheckpointError
from tests.faults.tiny_run import METADATA, is_state_at, name_at, pieces_at, position_at


def write(directory: Path, step: int) -> Path:
    directory.mkdir(exist_ok=True)
    pieces = {name: encode(value, name=name) for name, value in pieces_at(step).items()}
    header = {**position_at(step)._asdict(), **METADATA}
    write_checkpoint(directory / name_at(step), pieces, header=header, before_commit=lambda: None)
    return directory / name_at(step)


def test_a_written_checkpoint_is_read_back_with_its_position(directory: Path) -> None:
    path = write(directory, 3)
    loaded = decode_files(read_files(path), path)
    assert loaded.name == path.name
    assert position_at(3)._asdict().items() <= loaded.manifest.items()
    assert is_state_at(loaded.pieces, 3)
    assert is_committed(path)


def test_each_piece_of_a_checkpoint_is_a_file_and_in_the_manifest(directory: Path) -> None:
    path = write(directory, 3)
    listed = json.loads((path / MANIFEST).read_text())["files"]
    pieces = {
        "ema.safetensors",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "trainer.json",
        "trainer.safetensors",
    }
    assert set(listed) == pieces
    assert {each.name for each in path.iterdir()} == {*pieces, MANIFEST, COMMIT}
    assert all((path / name).stat().st_size == entry["bytes"] for name, entry in listed.items())


def test_a_checkpoint_that_fails_before_its_commit_does_not_exist(directory: Path) -> None:
    directory.mkdir()

    def fail() -> None:
        assert list_checkpoints(directory) == []
        raise OSError("the history cannot be synced")

    header = {**position_at(1)._asdict(), **METADATA}
    pieces = {"model": encode({"w": torch.ones(2)}, name="model")}
    with pytest.raises(OSError, match="cannot be synced"):
        write_checkpoint(directory / name_at(1), pieces, header=header, before_commit=fail)
    assert list_checkpoints(directory) == []


@pytest.mark.parametrize("file", [COMMIT, MANIFEST, "model.safetensors", "optimizer.json"])
def test_a_byte_that_differs_in_any_file_of_a_checkpoint_is_found(
    directory: Path, file: str
) -> None:
    path = write(directory, 3)
    data = bytearray((path / file).read_bytes())
    data[-2] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(CheckpointError, match="CKPT_DAMAGED"):
        read_files(path)


@pytest.mark.parametrize("skeleton", [b'{"$tensor":"no"}', b'{"$tuple":5}', b'{"$dict":[[[],1]]}'])
def test_a_piece_that_does_not_fit_its_tensors_is_damaged(directory: Path, skeleton: bytes) -> None:
    path = write(directory, 3)
    files = read_files(path) | {"optimizer.json": skeleton}
    with pytest.raises(CheckpointError, match=r"CKPT_DAMAGED.*optimizer"):
        decode_files(files, path)


def test_a_checkpoint_without_its_mark_is_not_complete(directory: Path) -> None:
    path, other = write(directory, 3), write(directory, 4)
    assert commit_mark(path) not in (None, commit_mark(other))
    (path / COMMIT).unlink()
    assert commit_mark(path) is None
    assert not is_committed(path)
    assert is_committed(other)
    (other / COMMIT).write_bytes(b"0" * 64 + b"\n")
    assert not is_committed(other), "it is not the mark of this manifest"


def test_a_checkpoint_under_the_name_of_another_position_is_refused(directory: Path) -> None:
    path = write(directory, 3).rename(directory / name_at(4))
    with pytest.raises(CheckpointError, match=f"it belongs to {name_at(3)}"):
        read_manifest(path)


def test_a_checkpoint_of_another_format_names_the_versions(directory: Path) -> None:
    path = write(directory, 3)
    manifest = json.dumps(json.loads((path / MANIFEST).read_text()) | {"format": 2}).encode()
    (path / MANIFEST).write_bytes(manifest)
    (path / COMMIT).write_text(f"{hashlib.sha256(manifest).hexdigest()}\n")
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1: use"):
        read_manifest(path)


def test_checkpoints_are_listed_by_position_and_other_names_are_not(directory: Path) -> None:
    assert list_checkpoints(directory) == []
    for step in (10, 9, 100):
        (directory / name_at(step)).mkdir(parents=True)
    (directory / f"damaged-{name_at(8)}").mkdir()
    assert [path.name for path in list_checkpoints(directory)] == [
        name_at(9),
        name_at(10),
        name_at(100),
    ]
    directory.with_name("link").symlink_to(directory)
    with pytest.raises(CheckpointError, match="CKPT_LINK"):
        list_checkpoints(directory.with_name("link"))
