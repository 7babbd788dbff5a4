"""A save by several processes, of which one is killed, cannot write, or sees another disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_trainer.core.errors import CheckpointError, DivergedError
from tests import processes
from tests.faults.disks import installed
from tests.faults.power_loss import LAST_STEP, Change, replay
from tests.faults.shard_kills import ALL_KILLS, NUM_CHANGES, Kill, run_kills
from tests.faults.tiny_run import leftovers, name_at, position_at, valid_steps
from tests.faults.tiny_shards import (
    MAX_FAILED_SAVES,
    ArmedDisk,
    FailingOnce,
    Run,
    TracingDisk,
    read_trace,
    sharded_pieces_at,
)
from tests.variants import slow

pytestmark = pytest.mark.crash


def count_changes(folder: Path) -> None:
    run = Run(folder)
    disk = ArmedDisk()
    for _ in range(3):
        run.save()
    with installed(disk):
        disk.is_armed = True
        run.save()  # and delete the second, of which the first is the best
    assert len(disk.operations) == NUM_CHANGES[run.rank], disk.operations
    assert all(
        f"/r0000{run.rank}." in each or not each.endswith(".safetensors") or run.rank == 0
        for each in disk.operations
    )
    run.end()


def test_the_campaign_of_kills_knows_how_many_changes_a_save_makes(tmp_path: Path) -> None:
    processes.run(count_changes, tmp_path, num_processes=2, folder=tmp_path / "logs")


# By process: before its file, in it, after it and before it has said so; then of main in the
# manifest, after COMMIT, before and after the rename.
SHOWN = [
    Kill(1, 0, "before"),
    Kill(1, 2, "half"),
    Kill(1, 14, "after"),
    Kill(0, 34, "half"),
    Kill(0, 42, "half"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_all", [False, *slow([True])], ids=["shown", "more"])
def test_a_kill_of_any_process_in_a_save_loses_nothing(
    scratch: Path, is_all: bool, effort: int
) -> None:
    """Fault (Sharded checkpoints): a process is killed before, during or after the write of its
    file of shards, or the main process while it writes the manifest, or just before or after the
    rename -> the checkpoint is either committed or absent, the other processes end, and the run
    resumes from the newest committed checkpoint
    """
    (scratch / "run").mkdir()
    kills = ALL_KILLS[2 :: max(1, 13 // effort)] if is_all else SHOWN
    tally = run_kills(scratch / "run", kills)
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.kills.total() == len(kills)


def fail_at_each_change_of(folder: Path, victim: int) -> None:
    """Let each change of a save by process `victim` fail once, and save again."""
    run = Run(folder)
    run.save()
    for at in range(NUM_CHANGES[1]):
        before = run.step
        disk = (
            FailingOnce(at, errno.EIO if at % 2 else errno.ENOSPC)
            if run.rank == victim
            else ArmedDisk()
        )
        with installed(disk):
            disk.is_armed = True
            run.save(must_succeed=False)
        assert run.checkpointer.num_failed_saves == 1, "all processes count the failure of one"
        assert run.checkpointer.last_committed == name_at(before)
        if run.rank == 0:
            assert not leftovers(folder)
            assert name_at(before + 1) not in os.listdir(folder / "checkpoints")
        run.save()
    run.end()


def test_a_process_that_cannot_write_or_sync_votes_no_and_nobody_commits(scratch: Path) -> None:
    """Fault (Sharded checkpoints): a process cannot write or sync its file, or its disk is full ->
    it votes no, so no manifest is written and no process commits. All count the failure, and
    training continues; after `--checkpoint.max-failed-saves` failures in a row, all end with the
    same line and exit code 74
    """
    job = processes.run(
        fail_at_each_change_of, scratch, 1, num_processes=2, folder=scratch / "logs"
    )
    lines = [line for line in job.output(0).splitlines() if "error[CKPT" in line]
    assert len(lines) == NUM_CHANGES[1]
    assert "error[CKPT_NO_SPACE]: a checkpoint could not be saved in" in lines[0]
    assert (
        "(process 1: No space left on device); older checkpoints are intact and training continues"
        in lines[0]
    )
    assert "error[CKPT_IO]" in lines[1]
    assert "error[CKPT" not in job.output(1)
    assert valid_steps(scratch)[-1] == 1 + 2 * NUM_CHANGES[1]


def fail_too_often(folder: Path) -> None:
    run = Run(folder)
    run.save()
    try:
        for _ in range(MAX_FAILED_SAVES):
            disk = FailingOnce(3) if run.rank == 1 else ArmedDisk()
            with installed(disk):
                disk.is_armed = True
                run.save(must_succeed=False)
    except CheckpointError as error:
        print(f"raised {error}")
    run.end()


def test_a_disk_of_one_process_that_stays_full_ends_all_with_one_line(scratch: Path) -> None:
    job = processes.run(fail_too_often, scratch, num_processes=3, folder=scratch / "logs")
    lines = [
        [line for line in job.output(rank).splitlines() if line.startswith("raised")]
        for rank in range(3)
    ]
    assert lines[0] == lines[1] == lines[2]
    assert "CKPT_NO_SPACE" in lines[0][0]
    assert (
        "(process 1: No space left on device), failure 2 of 2: free or repair the disk and resume"
        in lines[0][0]
    )
    assert valid_steps(scratch) == [1]


def save_what_is_not_finite(folder: Path) -> None:
    run = Run(folder)
    run.save()
    pieces = sharded_pieces_at(2, run.mesh)
    if run.rank == 1:
        pieces["model"]["layer.weight"].to_local()[0, 1] = float("nan")  # type: ignore[index]
    run.checkpointer.save(position_at(2), pieces)
    with pytest.raises(DivergedError, match="CKPT_NONFINITE.*model: layer.weight is NaN or inf"):
        run.checkpointer.wait()
    run.end()


def test_a_nan_in_the_shard_of_one_process_ends_all(scratch: Path) -> None:
    """Fault (Sharded checkpoints): NaN or inf in the shard of one process -> all processes end with
    exit code 79; it is never saved
    """
    processes.run(save_what_is_not_finite, scratch, num_processes=2, folder=scratch / "logs")
    assert valid_steps(scratch) == [1]


def record(folder: Path, trace: Path) -> None:
    with installed(TracingDisk(trace)) as disk:
        run = Run(folder)
        for _ in range(LAST_STEP):
            run.save()
            if run.rank == 0:
                disk.append("acknowledge", Path(name_at(run.step)))
        run.end()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Change], Path]:
    """The changes of the disk by a run of two processes, and its folder."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "run").mkdir()
    processes.run(record, folder / "run", folder / "trace", num_processes=2, folder=folder / "logs")
    return read_trace(folder / "trace"), folder / "run"


def replay_in(
    scratch: Path, trace: tuple[list[Change], Path], without: tuple[str, str], num_states: int
) -> Iterator[str | None]:
    """Replay what was recorded without the changes of a kind to paths that have a text."""
    changes, folder = trace
    kept = [each for each in changes if not (each[0] == without[0] and without[1] in str(each[1]))]
    assert without == NOTHING or len(kept) < len(changes)
    moved = [
        (
            operation,
            scratch / "run" / path.relative_to(folder) if path.is_absolute() else path,
            details,
        )
        for operation, path, details in kept
    ]
    return replay(moved, scratch / "run", num_states=num_states)


NOTHING = ("", "")


def test_no_power_loss_takes_an_acknowledged_checkpoint_of_shards(
    scratch: Path, trace: tuple[list[Change], Path], effort: int
) -> None:
    """Fault (Sharded checkpoints): power loss in a save -> the newest committed checkpoint loads"""
    states = list(replay_in(scratch, trace, NOTHING, 1000 * effort))
    assert len(states) >= 1000 * effort
    assert not any(states), [problem for problem in states if problem][:3]


@pytest.mark.parametrize(
    "without",
    [("sync", "r00001"), *slow([(("sync_directory", "/model"),), (("sync_directory", "/.tmp-"),)])],
)
def test_a_protocol_of_shards_with_a_sync_left_out_loses_checkpoints(
    scratch: Path, trace: tuple[list[Change], Path], without: tuple[str, str]
) -> None:
    assert any(replay_in(scratch, trace, without, 1))


def start_apart(folder: Path) -> None:
    mine = folder / f"machine-{os.environ['RANK']}"
    (mine / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="CKPT_PREFLIGHT.*which they do not share .process 0"):
        Run(mine)


def test_processes_without_a_shared_disk_are_refused_before_any_work(scratch: Path) -> None:
    """Fault (Sharded checkpoints): the processes do not share the disk -> exit 74 before the first
    step
    """
    processes.run(start_apart, scratch, num_processes=2, folder=scratch / "logs")
