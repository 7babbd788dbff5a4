"""Parameters that nothing changes are on the disk once, and each checkpoint is still whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_trainer.checkpoint.format import (
    FROZEN_FILE,
    FROZEN_ORDER,
    MANIFEST,
    LoadedCheckpoint,
    decode_files,
    read_files,
)
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.errors import CheckpointError
from tests.faults.tiny_run import (
    is_state_at,
    make,
    name_at,
    pieces_at,
    position_at,
    save,
)


def load(directory: Path, step: int) -> LoadedCheckpoint:
    path = directory / name_at(step)
    return decode_files(read_files(path), path)


def frozen_file(directory: Path, step: int) -> Path:
    return directory / name_at(step) / FROZEN_FILE


def refuse_link(*_: object, error: int = errno.EPERM) -> None:
    raise OSError(error, os.strerror(error))


def save_with_base(checkpointer: Checkpointer, step: int, base: Tensor) -> None:
    pieces: Any = pieces_at(step)
    pieces["model"]["base.weight"] = base
    checkpointer.save(position_at(step), pieces)
    checkpointer.wait(must_succeed=True)


def test_checkpoints_share_the_file_of_frozen_parameters(directory: Path) -> None:
    save(make(directory, keep_last_n=3), 1, 2, 3)
    assert len({frozen_file(directory, step).stat().st_ino for step in (1, 2, 3)}) == 1
    assert all(is_state_at(load(directory, step).pieces, step) for step in (1, 2, 3))


def test_retention_takes_a_name_of_the_file_and_not_its_content(directory: Path) -> None:
    save(make(directory), 1, 2, 3, 4, 5)
    assert frozen_file(directory, 5).stat().st_nlink == 2
    assert is_state_at(load(directory, 5).pieces, 5)


def test_the_room_that_is_required_is_what_two_checkpoints_take(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: 0)
        with pytest.raises(CheckpointError, match="CKPT_PREFLIGHT.*2 more checkpoints") as refused:
            make(directory)
    (needed,) = re.findall(r"must fit \(([\d,]+) bytes", str(refused.value))
    save(make(directory, keep_last_n=2), 1, 2)
    files = {path.stat().st_ino: path for path in directory.glob("step-*/*.safetensors")}
    tensors = [each for path in files.values() for each in load_file(path).values()]
    assert int(needed.replace(",", "")) == sum(each.nbytes for each in tensors)


def test_a_run_that_is_started_again_links_the_file_that_it_finds(directory: Path) -> None:
    save(make(directory), 1, 2)
    save(make(directory), 3)
    assert frozen_file(directory, 3).samefile(frozen_file(directory, 2))


def test_a_copy_of_a_checkpoint_is_whole(directory: Path) -> None:
    save(make(directory), 1, 2)
    copied = directory.with_name("copy") / name_at(2)
    shutil.copytree(directory / name_at(2), copied)
    shutil.rmtree(directory)
    assert is_state_at(load(copied.parent, 2).pieces, 2)


@pytest.mark.parametrize("harm", ["damaged", "deleted", "replaced by a link"])
def test_a_file_that_is_not_as_it_was_written_is_not_linked(directory: Path, harm: str) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1, 2)
    path = frozen_file(directory, 2)
    if harm == "damaged":
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.unlink()
    if harm == "replaced by a link":
        path.symlink_to(frozen_file(directory, 1))
    with pytest.raises(CheckpointError, match="CKPT_DAMAGED"):
        load(directory, 2)
    save(checkpointer, 3)
    assert is_state_at(load(directory, 3).pieces, 3)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_where_no_file_can_be_linked_each_checkpoint_has_its_own(
    directory: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", partial(refuse_link, error=error))
    save(make(directory), 1, 2, 3)
    assert frozen_file(directory, 3).stat().st_nlink == 1
    assert all(is_state_at(load(directory, step).pieces, step) for step in (2, 3))


def test_what_is_changed_by_hand_once_is_not_frozen_any_more(directory: Path) -> None:
    checkpointer = make(directory, keep_last_n=9)
    bases = [torch.arange(5.0) * scale for scale in (1, 1, 2, 3, 3, 3)]
    for step, base in enumerate(bases, 1):
        save_with_base(checkpointer, step, base)
    for step, base in enumerate(bases, 1):
        assert torch.equal(load(directory, step).pieces["model"]["base.weight"], base)
    has_file = [frozen_file(directory, step).exists() for step in range(1, 7)]
    assert has_file == [True, True, False, False, False, False]
    assert frozen_file(directory, 2).samefile(frozen_file(directory, 1))


def test_elements_that_change_places_are_a_change(directory: Path) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    save_with_base(checkpointer, 2, torch.arange(5.0).roll(1))
    assert not frozen_file(directory, 2).exists()


def test_an_average_that_differs_has_its_own(directory: Path) -> None:
    checkpointer = make(directory)
    pieces: Any = pieces_at(1)
    pieces["ema"]["base.weight"] = torch.full((5,), -0.0)
    pieces["model"]["base.weight"][0] = 0.0
    checkpointer.save(position_at(1), pieces)
    checkpointer.wait(must_succeed=True)
    loaded = load(directory, 1).pieces
    assert torch.equal(loaded["model"]["base.weight"], torch.arange(5.0))
    assert torch.equal(loaded["ema"]["base.weight"].signbit(), torch.ones(5, dtype=torch.bool))


def test_without_frozen_parameters_a_checkpoint_is_as_it_ever_was(directory: Path) -> None:
    checkpointer = make(directory)
    checkpointer.unstepped = tuple
    checkpointer.save(position_at(1), pieces_at(1))
    checkpointer.wait(must_succeed=True)
    listed = json.loads((directory / name_at(1) / MANIFEST).read_text())["files"]
    assert not any("frozen" in name for name in listed)
    assert is_state_at(load(directory, 1).pieces, 1)


def test_names_of_tensors_that_no_file_has_are_damage(directory: Path) -> None:
    save(make(directory), 1)
    files = read_files(directory / name_at(1))
    order = json.loads(bytes(files[FROZEN_ORDER]))
    order["model"].append("more")
    files[FROZEN_ORDER] = json.dumps(order).encode()
    with pytest.raises(CheckpointError, match="CKPT_DAMAGED.*more"):
        decode_files(files, directory / name_at(1))
