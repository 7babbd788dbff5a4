"""What counts as stuck, and what is said of a process that does not answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import BatchConfig, Callback, RecipeConfig, StepReport, Trainer, main
from accel_trainer.checkpoint import manager
from accel_trainer.fault_tolerance import watchdog
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.fault_tolerance.preemption import StopFlag
from accel_trainer.fault_tolerance.watchdog import Watchdog
from tests import processes, variants, workload
from tests.faults import signals

TIMEOUT_S = 600.0
LIMIT_S = 3.0  # while something is slow: what else a busy machine takes its time for is not watched
SLOW_S = 4.0


def be_slow(seconds: float) -> None:
    watchdog._GRACE_S = LIMIT_S - TIMEOUT_S
    time.sleep(seconds)
    watchdog._GRACE_S = 0.0


class SlowCallback(Callback):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == 2:
            be_slow(self._seconds)


def train(
    folder: Path, slow: str | None, stuck_timeout_s: float | None, timeout_s: float = TIMEOUT_S
) -> None:
    watchdog._INTERVAL_S = 0.05
    config = workload.make_config(
        folder, batch=BatchConfig(per_device_batch_size=2, global_batch_size=16, eval_batch_size=10)
    )
    runtime = replace(config.runtime, timeout_s=timeout_s, stuck_timeout_s=stuck_timeout_s)
    config = replace(config, runtime=runtime, trainer=replace(config.trainer, max_steps=3))
    if slow == "disk":
        slow_down(manager, "write_checkpoint", SLOW_S, at=2)
    if slow == "accumulation":
        slow_down(workload.ClassificationTask, "step", SLOW_S / 8, at=None)
    if slow == "evaluation":
        slow_down(workload.ClassificationTask, "eval_step", SLOW_S / 4, at=None)
    callbacks = [
        SlowCallback(seconds)
        for kind, seconds in (("callback", SLOW_S), ("stuck", 600.0))
        if kind == slow
    ]
    main(
        lambda _: workload.train(config, callbacks=tuple(callbacks)),
        RecipeConfig,
        description="",
        argv=[],
    )


def slow_down(owner: Any, name: str, seconds: float, *, at: int | None) -> None:
    """Let a function take longer, in its call `at` or in all."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 1000))

    def slow(*arguments: Any, **options: Any) -> Any:
        if at in (None, next(calls)):
            be_slow(seconds)
        return function(*arguments, **options)

    setattr(owner, name, slow)


@pytest.mark.parametrize(
    ("slow", "stuck_timeout_s"),
    [
        ("callback", None),  # one process has no limit unless it is given one
        ("disk", TIMEOUT_S),
        *variants.slow([("accumulation", TIMEOUT_S), ("evaluation", TIMEOUT_S)]),
    ],
)
def test_slow_work_is_not_stuck(tmp_path: Path, slow: str, stuck_timeout_s: float | None) -> None:
    processes.run(train, tmp_path / "run", slow, stuck_timeout_s, folder=tmp_path / "logs")


def test_a_stuck_timeout_ends_a_process_and_shows_its_stacks(tmp_path: Path) -> None:
    job = processes.run(
        train, tmp_path / "run", "stuck", TIMEOUT_S, folder=tmp_path / "logs", codes=[70]
    )
    assert (
        "error[STUCK]: rank 0, step 2, training: stuck, no progress for"
        in job.output().splitlines()[-1]
    )
    assert "in on_step_end" in job.output()


class Tee:
    """A stderr without a file, as a logger puts it in place of Python's."""

    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass


def hang_with_a_tee() -> None:
    sys.stderr = Tee()  # type: ignore[assignment]  # on purpose
    activity = Activity()
    activity.phase = "training"
    with Watchdog(activity, StopFlag(), timeout_s=-watchdog._GRACE_S, launcher_pid=None):
        time.sleep(600)


def test_a_stuck_process_ends_even_if_stderr_has_no_file(tmp_path: Path) -> None:
    job = processes.run(hang_with_a_tee, folder=tmp_path, codes=[70])
    assert "in hang_with_a_tee" in job.output()
    assert "accel_trainer: stuck for" in job.output()


def pause_and_train(folder: Path) -> None:
    signals.pause_in("step", lambda: signals.pause(folder, int(os.environ["RANK"])))
    train(folder / "run", None, None, timeout_s=12.0)


def test_a_process_that_is_suspended_too_long_is_reported_by_the_others(tmp_path: Path) -> None:
    job = processes.start(pause_and_train, tmp_path, num_processes=2, folder=tmp_path / "logs")
    signals.wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    suspended = job.processes[1]
    os.kill(suspended.pid or 0, signal.SIGSTOP)
    (tmp_path / "go").touch()
    job.processes[0].join(600)
    os.kill(suspended.pid or 0, signal.SIGCONT)
    assert 0 not in job.wait()
    for rank in (0, 1):
        (line,) = [
            line for line in job.output(rank).splitlines() if "accel_trainer: error" in line
        ] or [""]
        assert rank == 1 or "rank 1, step " in line, line
        assert "memory" not in line, line
    assert "suspended" in job.output(0).splitlines()[-1]
