from __future__ import annotations

import os
import platform
import stat
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from accel_trainer.checkpoint import loading
from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.errors import CheckpointError, DivergedError
from accel_trainer.core.train_state import TrainState, checkpoint_name
from accel_trainer.distributed.accelerator import _keep_freed_memory
from tests import processes
from tests.faults.disks import InterceptedDisk, installed
from tests.faults.tiny_run import (
    METADATA,
    damage,
    is_state_at,
    make,
    name_at,
    names,
    pieces_at,
    position_at,
    save,
)

# --- what is saved is what is loaded ---


def test_what_was_saved_is_loaded_exactly(directory: Path) -> None:
    save(make(directory), 1, 2, 3)
    loaded = load_checkpoint(directory)
    assert loaded is not None
    assert loaded.name == name_at(3)
    assert position_at(3)._asdict().items() <= loaded.manifest.items()
    assert is_state_at(loaded.pieces, 3)
    assert loaded.manifest["num_processes"] == 1


def test_there_is_nothing_to_load_before_the_first_save(directory: Path) -> None:
    assert load_checkpoint(directory) is None
    make(directory)
    assert load_checkpoint(directory) is None


def test_any_program_can_load_the_weights(directory: Path) -> None:
    save(make(directory), 1)
    state: dict[str, torch.Tensor] = {}
    for name in ("model.safetensors", "model.frozen.safetensors"):
        state |= safetensors.torch.load_file(directory / name_at(1) / name)
    assert state.keys() == pieces_at(1)["model"].keys()  # type: ignore[attr-defined]
    torch.testing.assert_close(state["layer.weight"], pieces_at(1)["model"]["layer.weight"])  # type: ignore[index]


def test_training_may_change_the_weights_while_they_are_written(directory: Path) -> None:
    checkpointer = make(directory)
    may_write = threading.Event()

    class WaitingDisk(InterceptedDisk):
        def intercept(
            self, operation: str, path: Path, act: Any, act_half: Any, *details: Any
        ) -> Any:
            may_write.wait()
            return act()

    pieces = pieces_at(1)
    with installed(WaitingDisk()):
        checkpointer.save(position_at(1), pieces)
        pieces["model"]["layer.weight"].zero_()  # type: ignore[index]
        may_write.set()
        checkpointer.wait(must_succeed=True)
    loaded = load_checkpoint(checkpointer.directory)
    assert loaded is not None
    assert is_state_at(loaded.pieces, 1)


def test_a_save_waits_for_the_one_before(directory: Path) -> None:
    """Fault (Disk): a save takes longer than the time to the next one -> only one save runs at a
    time; training waits for it
    """
    checkpointer = make(directory)

    class SlowDisk(InterceptedDisk):
        def intercept(
            self, operation: str, path: Path, act: Any, act_half: Any, *details: Any
        ) -> Any:
            time.sleep(0.005)
            return act()

    with installed(SlowDisk()):
        for step in (1, 2, 3):
            checkpointer.save(position_at(step), pieces_at(step))
        checkpointer.wait(must_succeed=True)
    assert [path.name for path in list_checkpoints(directory)] == [name_at(2), name_at(3)]
    assert checkpointer.last_committed == name_at(3)


def test_the_history_is_synced_before_the_commit_of_a_checkpoint(directory: Path) -> None:
    seen: list[list[str]] = []
    checkpointer = Checkpointer(
        directory,
        config=CheckpointConfig(),
        header={},
        before_commit=lambda: seen.append(names(directory)),
    )
    checkpointer.prepare({})
    save(checkpointer, 1)
    assert len(seen) == 1
    assert name_at(1) not in seen[0]


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0, 0o644, 0o755), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_the_umask_decides_who_reads_and_nobody_else_writes(
    directory: Path, umask: int, file: int, folder: int
) -> None:
    """Fault (Malice): a checkpoint that others can write -> it is read as plain data or refused.
    Only you can write to the checkpoints of your runs, whatever the umask; the umask decides who
    can read them
    """
    previous = os.umask(umask)
    try:
        save(make(directory), 1)
    finally:
        os.umask(previous)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (directory / name_at(1)).iterdir()}
    assert modes == {file}
    assert stat.S_IMODE((directory / name_at(1)).stat().st_mode) == folder


def test_a_state_that_cannot_be_stored_is_an_error_at_once(directory: Path) -> None:
    checkpointer = make(directory)
    with pytest.raises(CheckpointError, match=r"CKPT_TYPE.*trainer\.x is a builtins\.set"):
        checkpointer.save(position_at(1), {"trainer": {"x": {1}}})
    assert names(directory) == []


# --- names and order ---


def test_a_name_is_a_position_and_no_clock_changes_the_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault (Resume): the system clock jumps -> nothing changes: checkpoints are ordered by step,
    and durations are measured with a monotonic clock
    """
    clock = iter(range(10**6, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    checkpointer = make(directory, keep_last_n=3)
    before, after = TrainState(9, 0, 9, 72), TrainState(9, 1, 0, 72)
    for position in (before, after, TrainState(10, 1, 1, 80)):
        checkpointer.save(position, pieces_at(position.optimizer_step))
    checkpointer.wait(must_succeed=True)
    assert names(directory) == [
        "step-0000000009-epoch-00000",
        "step-0000000009-epoch-00001",
        "step-0000000010-epoch-00001",
    ]
    assert checkpoint_name(after) == names(directory)[1]
    loaded = load_checkpoint(checkpointer.directory, checkpoint_name(after))
    assert loaded is not None
    assert after._asdict().items() <= loaded.manifest.items()


def test_a_valid_checkpoint_at_the_same_position_is_kept(directory: Path) -> None:
    save(make(directory), 1)
    inode = (directory / name_at(1)).stat().st_ino
    save(make(directory), 1)
    assert (directory / name_at(1)).stat().st_ino == inode


def test_the_last_save_is_not_read_again_where_a_run_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(directory)
    save(checkpointer, 1)
    monkeypatch.setattr(loading, "read_files", lambda path: pytest.fail(f"{path} is read"))
    save(checkpointer, 1)
    assert names(directory) == [name_at(1)]


@pytest.mark.parametrize(("cause", "label"), [("bytes", "damaged"), ("config", "superseded")])
def test_another_checkpoint_at_the_same_position_is_quarantined(
    directory: Path, cause: str, label: str
) -> None:
    save(make(directory), 1)
    metadata = dict(METADATA)
    if cause == "bytes":
        damage(directory, 1)
    else:
        metadata["settings"] = {"seed": 1}
    checkpointer = make(directory, metadata)
    save(checkpointer, 1)
    assert names(directory) == sorted([f"{label}-{name_at(1)}", name_at(1)])
    assert load_checkpoint(checkpointer.directory) is not None


# --- NaN and inf ---


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("piece", ["model", "optimizer"])
def test_a_state_that_is_not_finite_is_never_committed(
    directory: Path, piece: str, value: float
) -> None:
    """Fault (Corruption): NaN or inf in stored weights -> the save refuses them, so no checkpoint
    contains any
    """
    checkpointer = make(directory)
    save(checkpointer, 1)
    pieces: dict[str, Any] = pieces_at(2)
    tensor = (
        pieces["model"]["layer.weight"]
        if piece == "model"
        else pieces["optimizer"]["state"][0]["momentum_buffer"]
    )
    tensor[1, 2] = value
    checkpointer.save(position_at(2), pieces)
    with pytest.raises(DivergedError, match=rf"CKPT_NONFINITE.*{piece}.*{name_at(1)}"):
        checkpointer.wait()
    assert names(directory) == [name_at(1)]
    save(checkpointer, 3)


def test_a_resumed_run_whose_first_state_is_not_finite_says_so(
    directory: Path,
) -> None:
    save(make(directory), 1)
    checkpointer = make(directory)
    pieces: dict[str, Any] = pieces_at(2)
    pieces["model"]["layer.weight"][0, 0] = float("nan")
    checkpointer.save(position_at(2), pieces)
    with pytest.raises(DivergedError) as caught:
        checkpointer.wait()
    assert "None" not in str(caught.value)


def test_large_weights_whose_sum_overflows_are_finite(directory: Path) -> None:
    checkpointer = make(directory)
    checkpointer.save(
        position_at(1), {"model": {"w": torch.full((9,), 3e38), "h": torch.full((9,), 6e4).half()}}
    )
    checkpointer.wait(must_succeed=True)
    assert checkpointer.last_committed == name_at(1)


def test_a_save_leaves_the_cores_to_the_training(tmp_path: Path) -> None:
    processes.run(check_threads_of_a_save, tmp_path / "checkpoints", folder=tmp_path / "logs")


def check_threads_of_a_save(folder: Path) -> None:
    torch.set_num_threads(3)
    weights = torch.ones(1 << 20)
    weights.sum()  # starts the other two
    before = len(os.listdir("/proc/self/task"))
    checkpointer = Checkpointer(folder, config=CheckpointConfig(), header={})
    checkpointer.prepare({"model": {"weights": weights}})
    checkpointer.save(TrainState(optimizer_step=1), {"model": {"weights": weights}})
    checkpointer.wait(must_succeed=True)
    assert len(os.listdir("/proc/self/task")) == before + 1, (
        "the writer computes on one core, its own"
    )
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to free memory")
def test_the_end_of_a_run_holds_no_copy_of_its_state(tmp_path: Path) -> None:
    processes.run(check_memory_at_the_end, tmp_path / "checkpoints", folder=tmp_path / "logs")


def check_memory_at_the_end(folder: Path) -> None:
    _keep_freed_memory()
    weights = {f"{number}": torch.ones(1 << 20) for number in range(16)}  # 64 MiB
    checkpointer = Checkpointer(folder, config=CheckpointConfig(), header={})
    checkpointer.prepare({"model": weights})
    before = psutil.Process().memory_info().rss
    taken = []
    for step in (1, 2):
        checkpointer.save(TrainState(optimizer_step=step), {"model": weights})
        checkpointer.wait(must_succeed=step == 2)
        taken.append(psutil.Process().memory_info().rss - before)
    assert taken[0] > 60 * 2**20, "the next save reuses the memory of the copy"
    # Modules that the first save imports stay.
    assert taken[0] - taken[1] > 50 * 2**20, taken
