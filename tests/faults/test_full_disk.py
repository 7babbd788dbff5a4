"""A really full disk, when a run starts or when it has trained and writes what it leaves behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accel_trainer import Callback, RecipeConfig, Trainer, main
from accel_trainer.core.errors import ExitCode
from tests import processes, workload
from tests.faults.disks import can_mount, fill, mount_small_disk

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs a user namespace")


def exit_code(folder: Path, *callbacks: Callback) -> int:
    def train(config: RecipeConfig) -> object:
        config = workload.make_config(folder)
        return workload.train(
            replace(config, trainer=replace(config.trainer, max_steps=2)), callbacks=callbacks
        )

    with pytest.raises(SystemExit) as ended:
        main(train, RecipeConfig, description="", argv=[])
    assert isinstance(ended.value.code, int)
    return int(ended.value.code)


class FillAfterSaves(Callback):
    """Fills the disk when the checkpoint of the last step is safe."""

    def __init__(self, filler: Path) -> None:
        self._filler = filler

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        if trainer.is_finished:
            trainer._checkpointer.wait(must_succeed=True)
            fill(self._filler)


def start_on_ever_less_full_disks(mount: Path) -> None:
    """With each additional page, another of the files written at the start finds no room first."""
    mount_small_disk(mount)
    # Outside of a repository, as its uncommitted changes would be one of the files.
    sys.argv[0] = str(mount / "recipe.py")
    codes = []
    for num_free_pages in range(6):
        fill(mount / "filler")
        os.truncate(
            mount / "filler",
            (mount / "filler").stat().st_size - num_free_pages * os.sysconf("SC_PAGESIZE"),
        )
        codes.append(exit_code(mount / "run"))
        (mount / "filler").unlink()
        shutil.rmtree(mount / "run", ignore_errors=True)
    assert codes[0] == ExitCode.OUTPUT
    assert set(codes) == {ExitCode.OUTPUT, ExitCode.CHECKPOINT}, codes


def end_on_a_full_disk(mount: Path) -> None:
    mount_small_disk(mount)
    assert exit_code(mount / "run", FillAfterSaves(mount / "filler")) == ExitCode.OUTPUT
    assert not (mount / "run" / "result.json").exists()
    (mount / "filler").unlink()
    assert exit_code(mount / "run") == ExitCode.DONE
    assert (mount / "run" / "export" / "model.safetensors").exists()
    assert (mount / "run" / "result.json").exists()


def test_a_start_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Fault (Disk): no space (ENOSPC) at any write -> a warning; no temporary file is left, and
    training continues. After `--checkpoint.max-failed-saves` failed saves in a row, the run ends
    with exit code 74. Log rows are kept and written later. At the start and during the export,
    the run ends with exit code 73, and the same command resumes it
    """
    output = run(start_on_ever_less_full_disks, tmp_path)
    assert output.count("accel_trainer: error[") == 6


def test_a_disk_that_fills_after_the_last_save_is_one_line_and_resumed(
    tmp_path: Path,
) -> None:
    assert run(end_on_a_full_disk, tmp_path).count("accel_trainer: error[NO_SPACE]: ") == 1


def run(act: Callable[[Path], None], folder: Path) -> str:
    (folder / "disk").mkdir()
    output = processes.run(act, folder / "disk", folder=folder / "logs").output()
    assert "Traceback" not in output
    assert "(No space left on device): free some space and start again" in output
    return output
