"""What a run writes of how it is doing, and which process it names once another one has failed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accel_trainer import ConfigError, DataError, ProcessError
from accel_trainer.core.errors import PartFailed, PeerFailed
from accel_trainer.core.train_state import TrainState
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.fault_tolerance.failure_report import failures_reported
from accel_trainer.fault_tolerance.preemption import StopFlag
from accel_trainer.fault_tolerance.watchdog import Watchdog

LOST = dist.DistNetworkError("the connection is lost")
GLOO_LOST = RuntimeError(
    "[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
)


def train(
    folder: Path,
    error: BaseException | None = None,
    *,
    phase: str = "training",
    num_processes: int = 3,
) -> None:
    """Report what rank 0 of a run does, which ends in a phase or by an error."""
    activity = Activity()
    activity.state = TrainState(optimizer_step=7)
    watchdog = Watchdog(
        activity, StopFlag(num_processes=1, timeout_s=60), timeout_s=60, launcher_pid=None
    )
    with failures_reported(folder, activity, watchdog, rank=0, num_processes=num_processes):
        assert read(folder / "status.json")["state"] == "running"
        activity.phase = phase
        if error is not None:
            raise error


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def write_record(
    folder: Path, rank: int, *, pid: int = os.getpid(), failure: dict[str, Any] | None = None
) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    record = {"pid": pid, "host": platform.node(), "failure": failure}
    (folder / "logs" / f"rank-{rank:05d}.json").write_text(json.dumps(record))


def failure(rank: int, error: str, *, time_s: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "where": "step 6, save",
        "error": error,
        "exit_code": 65,
        "time_s": time_s,
    }


def failed_callback(error: Exception) -> PartFailed:
    """Return what a run ends with if another process is gone while a callback waits for it."""
    failed = PartFailed(f"callback MetricLogger.on_step_end failed ({error})")
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize(
    ("phase", "exit_code"), [("done", 0), ("stopped", 0), ("preempted", 75), ("diverged", 79)]
)
def test_status_json_says_how_a_run_ended(tmp_path: Path, phase: str, exit_code: int) -> None:
    train(tmp_path, phase=phase)
    assert read(tmp_path / "status.json") == {
        "state": phase,
        "exit_code": exit_code,
        "optimizer_step": 7,
        "last_commit": None,
        "error": None,
        "pid": os.getpid(),
        "host": platform.node(),
    }


def test_an_error_of_this_process_is_in_status_json_and_its_record(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(tmp_path, DataError("DATA", "no images: choose a different folder"))
    status = read(tmp_path / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 65)
    assert status["error"] == "rank 0, step 7, training: no images: choose a different folder"
    assert (
        read(tmp_path / "logs" / "rank-00000.json")["failure"]["error"]
        == "no images: choose a different folder"
    )


@pytest.mark.parametrize("code", [None, 0, False])
def test_an_exit_that_would_look_like_the_end_of_a_run_is_an_error(
    tmp_path: Path, code: object
) -> None:
    with pytest.raises(ProcessError, match="step 7, training: .*the same command") as caught:
        train(tmp_path, SystemExit(code))
    status = read(tmp_path / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", caught.value.exit_code)


@pytest.mark.parametrize("code", [3, "no more disk"])
def test_an_exit_that_tells_of_a_failure_keeps_its_code(tmp_path: Path, code: object) -> None:
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, SystemExit(code))
    assert caught.value.code == code
    status = read(tmp_path / "status.json")
    assert status["state"] == "failed"
    assert f"exit({code})" in status["error"]


@pytest.mark.parametrize("phase", ["done", "stopped"])
def test_an_exit_after_the_end_of_a_run_leaves_it_finished(tmp_path: Path, phase: str) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, SystemExit(0), phase=phase)
    status = read(tmp_path / "status.json")
    assert (status["state"], status["exit_code"], status["error"]) == (phase, 0, None)


def test_a_start_that_fails_leaves_a_finished_run_finished(tmp_path: Path) -> None:
    refusal = ConfigError("CONFIG_CHANGED", "made with a different config: set it back")
    status = tmp_path / "status.json"
    for phase, is_kept in (("done", True), ("stopped", True), ("preempted", False)):
        train(tmp_path, phase=phase)
        before = read(status)
        with pytest.raises(ConfigError):
            train(tmp_path, refusal, phase="start")
        assert (read(status) == before) is is_kept, phase
        assert read(tmp_path / "logs" / "rank-00000.json")["failure"] is not None
    train(tmp_path, phase="done")
    with pytest.raises(ConfigError):
        train(tmp_path, refusal, phase="training")
    assert read(status)["state"] == "failed"


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        GLOO_LOST,
        PeerFailed("a metric failed on another process"),
        failed_callback(LOST),
        failed_callback(GLOO_LOST),
    ],
)
def test_of_several_failures_the_first_is_named_by_who_lost_its_peers(
    tmp_path: Path, error: Exception
) -> None:
    write_record(tmp_path, 1, failure=failure(1, "a consequence", time_s=20))
    write_record(tmp_path, 2, failure=failure(2, "the cause", time_s=10))
    with pytest.raises(ProcessError, match="rank 2, step 6, save: the cause") as caught:
        train(tmp_path, error)
    assert (caught.value.rank, caught.value.exit_code) == (2, 65)
    status = read(tmp_path / "status.json")
    assert (status["state"], status["error"]) == ("failed", "rank 2, step 6, save: the cause")


@pytest.mark.parametrize(
    "error", [ValueError("Connection timed out"), ConfigError("CONFIG", "the connection by gloo")]
)
def test_an_error_of_no_collective_is_not_blamed_on_another_process(
    tmp_path: Path, error: Exception
) -> None:
    write_record(tmp_path, 1, failure=failure(1, "something else", time_s=10))
    with pytest.raises(type(error)) as caught:
        train(tmp_path, error)
    assert caught.value is error


def test_a_process_that_left_no_error_is_named(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_record(tmp_path, 1)
    write_record(tmp_path, 2, pid=gone.pid)
    line = "rank 2, step 7, training: exited without an error report: killed, or out of memory"
    with pytest.raises(ProcessError, match=line) as caught:
        train(tmp_path, LOST)  # in the user's code, as a forward that waits for buffers
    assert caught.value.exit_code == 70


def test_a_bug_is_shown_with_the_place_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        train(tmp_path, ZeroDivisionError("by zero"))
    (note,) = vars(caught.value)["__notes__"]
    assert note.startswith("rank 0, step 7, training: ZeroDivisionError: by zero")
