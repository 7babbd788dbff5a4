from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.guards import check_not_moved, guarded_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def test_a_guarded_folder_that_stays_may_be_changed(folder: Path) -> None:
    with guarded_folder(folder):
        (folder / "checkpoints" / "file").touch()
        check_not_moved(folder / "checkpoints" / "file")


def test_a_guarded_folder_that_was_renamed_is_refused(folder: Path) -> None:
    with guarded_folder(folder):
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(CheckpointError, match=f"the folder is gone: there is no {folder}"):
            check_not_moved(folder / "checkpoints" / "file")
        folder.with_name("elsewhere").rename(folder)
        check_not_moved(folder / "checkpoints" / "file")  # put back


def test_another_folder_in_place_of_a_guarded_one_is_refused(folder: Path) -> None:
    with guarded_folder(folder):
        folder.rename(folder.with_name("elsewhere"))
        folder.mkdir()
        with pytest.raises(CheckpointError, match=f"a different {folder} in its place"):
            check_not_moved(folder)


def test_a_guard_says_nothing_of_other_folders_nor_after_its_block(folder: Path) -> None:
    with guarded_folder(folder):
        folder.rename(folder.with_name("elsewhere"))
        check_not_moved(folder.with_name("run-2") / "file")
    check_not_moved(folder / "file")
