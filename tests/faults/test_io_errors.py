"""A failing disk does not end a training at once, hurts no older checkpoint and leaves nothing."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest

from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.errors import CheckpointError, ExitCode
from accel_trainer.core.run_dir import free_bytes
from tests.faults.disks import CountingDisk, FailingDisk, installed
from tests.faults.tiny_run import (
    METADATA,
    begin,
    best_at,
    leftovers,
    name_at,
    pieces_at,
    valid_steps,
)
from tests.faults.tiny_run import save as save_step
from tests.variants import slow_but

ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]
ONCE = 1
UNTIL_REPAIRED = 10**6
SHOWN = [
    (errno.ENOSPC, ONCE),
    (errno.EIO, UNTIL_REPAIRED),
    (errno.EDQUOT, ONCE),
    (errno.EROFS, UNTIL_REPAIRED),
]
STEPS_BEFORE = 3


def make_checkpointer(folder: Path, **config: int) -> Checkpointer:
    checkpointer = Checkpointer(
        folder / "checkpoints", config=CheckpointConfig(**config), header=METADATA
    )
    checkpointer.prepare(pieces_at(0))
    begin(checkpointer)
    return checkpointer


def save(checkpointer: Checkpointer, step: int, *, must_succeed: bool = True) -> None:
    save_step(checkpointer, step, best=best_at(step), must_succeed=must_succeed)


def start(folder: Path) -> Checkpointer:
    checkpointer = make_checkpointer(folder)
    for step in range(1, STEPS_BEFORE + 1):
        save(checkpointer, step)
    return checkpointer


def count_changes_of_a_save(folder: Path) -> int:
    folder.mkdir()
    checkpointer = start(folder)
    disk = CountingDisk()
    with installed(disk):
        save(checkpointer, STEPS_BEFORE + 1)
    return len(disk.operations)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("error", "times"), slow_but(SHOWN, itertools.product(ERRORS, (ONCE, UNTIL_REPAIRED)))
)
def test_an_error_at_any_change_of_a_save_is_survived(
    scratch: Path, error: int, times: int
) -> None:
    """Fault (Disk): EIO, EDQUOT, EROFS, a file size limit -> a warning; no temporary file is left,
    and training continues. After `--checkpoint.max-failed-saves` failed saves in a row, the run
    ends with exit code 74. Log rows are kept and written later. At the start and during the
    export, the run ends with exit code 73, and the same command resumes it
    """
    for at in range(count_changes_of_a_save(scratch / "counted")):
        folder = scratch / str(at)
        folder.mkdir()
        checkpointer = start(folder)
        with installed(FailingDisk(at, error, times=times)):
            save(checkpointer, STEPS_BEFORE + 1, must_succeed=False)
        assert set(valid_steps(folder)) >= {1, STEPS_BEFORE}
        save(checkpointer, STEPS_BEFORE + 2)
        assert set(valid_steps(folder)) >= {1, STEPS_BEFORE + 2}
        assert len(valid_steps(folder)) >= 3
        assert not leftovers(folder)
        loaded = load_checkpoint(checkpointer.directory)
        assert loaded is not None
        assert loaded.name == name_at(STEPS_BEFORE + 2)
        checkpointer.close()
        shutil.rmtree(folder)


def test_a_failed_save_is_a_warning_with_a_code_that_says_why(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = start(scratch)
    with installed(FailingDisk(2, errno.ENOSPC, times=1)), caplog.at_level(logging.WARNING):
        save(checkpointer, STEPS_BEFORE + 1, must_succeed=False)
    assert "error[CKPT_NO_SPACE]" in caplog.text
    assert "failure 1 of 3" in caplog.text
    assert checkpointer.num_failed_saves == 1
    assert checkpointer.last_committed == name_at(STEPS_BEFORE)


def test_the_run_ends_after_the_set_number_of_failed_saves_in_a_row(scratch: Path) -> None:
    checkpointer = make_checkpointer(scratch, max_failed_saves=2)
    for step in (1, 2):
        with installed(FailingDisk(0, errno.EIO, times=1)):
            save(checkpointer, 2 * step, must_succeed=False)
        save(checkpointer, 2 * step + 1)  # a success in between starts the count again
    with installed(FailingDisk(0, errno.EIO, times=100)):
        save(checkpointer, 6, must_succeed=False)
        with pytest.raises(CheckpointError, match="CKPT_IO.*failure 2 of 2.*resume") as raised:
            save(checkpointer, 7, must_succeed=False)
    assert raised.value.exit_code == ExitCode.CHECKPOINT


def test_a_last_save_that_must_succeed_does_not_fail_quietly(scratch: Path) -> None:
    checkpointer = make_checkpointer(scratch)
    with (
        installed(FailingDisk(0, errno.EROFS, times=1)),
        pytest.raises(CheckpointError, match="CKPT_IO"),
    ):
        save(checkpointer, 1)


def test_a_folder_that_disappears_ends_the_run_and_is_not_made_again(scratch: Path) -> None:
    checkpointer = start(scratch)
    shutil.rmtree(scratch / "checkpoints")
    with pytest.raises(CheckpointError, match="the folder is gone"):
        save(checkpointer, STEPS_BEFORE + 1, must_succeed=False)
    assert not (scratch / "checkpoints").exists()


@pytest.mark.crash
@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_real_file_size_limit_is_survived(scratch: Path) -> None:
    child = os.fork()
    if child == 0:
        checkpointer = start(scratch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        save(checkpointer, STEPS_BEFORE + 1, must_succeed=False)
        is_intact = checkpointer.num_failed_saves == 1 and not leftovers(scratch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        save(checkpointer, STEPS_BEFORE + 2)
        os._exit(0 if is_intact else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert valid_steps(scratch) == [1, STEPS_BEFORE, STEPS_BEFORE + 2]


def test_no_space_for_two_checkpoints_is_an_error_before_the_first_step(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused_with(num_free_bytes: int) -> str:
        monkeypatch.setattr(
            "accel_trainer.checkpoint.manager.free_bytes", lambda path: num_free_bytes
        )
        with pytest.raises(CheckpointError, match=f"has {num_free_bytes:,} free") as refused:
            make_checkpointer(scratch)
        assert refused.value.code == "CKPT_PREFLIGHT"
        return str(refused.value)

    [of_two] = re.findall(r"2 more checkpoints must fit \(([\d,]+) bytes\)", refused_with(0))
    needed = int(of_two.replace(",", "")) // 2
    assert free_bytes(scratch) > needed > 40
    refused_with(2 * needed - 1)
    monkeypatch.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: 2 * needed)
    save(make_checkpointer(scratch), 1)
    assert f"1 more checkpoint must fit ({needed:,} bytes)" in refused_with(needed - 1)
    monkeypatch.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: needed)
    make_checkpointer(scratch)
