"""USR2 to a run: it saves at the next step boundary and trains on, to the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from accel_trainer import (
    Batch,
    Callback,
    CheckpointConfig,
    MeanLoss,
    RecipeConfig,
    StepOutput,
    StepReport,
    Trainer,
)
from accel_trainer.cli import launch
from accel_trainer.cli.recipe.main import main
from tests import processes, workload
from tests.faults.signals import go_on, join_group, note_signals, pause, wait_for
from tests.training.test_exactness import final_files
from tests.variants import slow

pytestmark = pytest.mark.signal

# The steps after which each number of processes saves if nobody asks: at the end of both epochs.
DUE = {1: [5, 10], 2: [3, 6]}


def rank() -> int:
    return int(os.environ.get("RANK", 0))


class Witness(Callback):
    """Pauses after a step, notes each save of the main process, and may kill the run after one."""

    def __init__(self, folder: Path, *, pause_at: int | None, killed_after: int | None) -> None:
        self._folder = folder
        self._pause_at = pause_at
        self._killed_after = killed_after

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self._pause_at:
            pause(self._folder, rank())

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        step = trainer.state.optimizer_step
        if trainer.accelerator.is_main_process:
            with (self._folder / "saves").open("a") as file:
                file.write(f"{step}\n")
        if step == self._killed_after:
            wait_for((self._folder / "run" / "checkpoints" / name / "COMMIT").exists)
            os.kill(os.getpid(), signal.SIGKILL)


class SignalInEvaluation(MeanLoss):
    """Sends this process USR2 at the next batch once it is armed, and disarms itself."""

    is_armed = False
    unsaved_attributes = ("is_armed",)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        if type(self).is_armed:
            type(self).is_armed = False
            os.kill(os.getpid(), signal.SIGUSR2)
        super().update(sums, batch, output)


class ArmsTheSignal(Callback):
    """Before the evaluation after step 10."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        SignalInEvaluation.is_armed = report.optimizer_step == 10


def child(
    folder: Path,
    *,
    pause_at: int | None = None,
    killed_after: int | None = None,
    in_group: bool = False,
    pauses_at_start: bool = False,
    num_workers: int | None = None,
    checkpoint: CheckpointConfig | None = None,
) -> None:
    """Train in the process of one rank; `pause` waits for the test."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    note_signals(folder, rank())
    if in_group:
        join_group(folder, rank())
    if num_workers is not None:
        multiprocessing.set_start_method("fork", force=True)  # the server of another would be hit
    if pauses_at_start:
        net = workload.SmallNet

        def paused_net(**options: Any) -> workload.SmallNet:
            pause(folder, rank())
            return net(**options)

        workload.SmallNet = paused_net  # type: ignore[misc, assignment]
    config = workload.make_config(folder / "run", checkpoint=checkpoint or CheckpointConfig())
    witness = Witness(folder, pause_at=pause_at, killed_after=killed_after)
    main(
        lambda _: workload.train(
            config, dropout=0.1, callbacks=(witness,), num_workers=num_workers
        ),
        RecipeConfig,
        description="",
        argv=[],
    )


def child_with(folder: Path, options: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    child(folder, **options)


def start(folder: Path, num_processes: int, **options: Any) -> processes.Job:
    folder.mkdir(exist_ok=True)
    return processes.start(
        child_with,
        folder,
        options,
        num_processes=num_processes,
        folder=folder / "logs",
        has_workers=bool(options.get("num_workers")),
    )


def wait_until_paused(job: processes.Job, folder: Path) -> None:
    ready = [folder / f"ready-{number}" for number in range(len(job.processes))]
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in ready))
    except AssertionError:
        raise AssertionError(job.output()) from None


def saves(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "saves").read_text().split()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    found = {}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp(f"whole-{number}")
        assert start(folder, number).wait() == [0] * number
        assert saves(folder) == DUE[number]
        found[number] = final_files(folder / "run")
    return found


@pytest.mark.parametrize(
    ("num_processes", "in_group"), [(1, False), (2, True), *slow([(1, True), (2, False)])]
)
def test_usr2_saves_once_and_the_run_ends_with_the_same_bytes(
    tmp_path: Path,
    undisturbed: dict[int, dict[str, bytes]],
    num_processes: int,
    in_group: bool,
) -> None:
    """To the last process only, or to all as of Slurm.

    Fault (Signals and processes): SIGUSR2, to one process or all -> not a fault: all processes save
    once after the same step and continue to the same final bytes; if it arrives during the start,
    they save after the first step
    """
    job = start(tmp_path, num_processes, pause_at=1, in_group=in_group)
    wait_until_paused(job, tmp_path)
    if in_group:
        os.killpg(int((tmp_path / "leader").read_text()), signal.SIGUSR2)
    else:
        os.kill(job.processes[-1].pid or 0, signal.SIGUSR2)
    go_on(tmp_path)
    assert job.wait() == [0] * num_processes, job.output()
    assert saves(tmp_path) == [num_processes, *DUE[num_processes]]  # two agree one step later
    assert final_files(tmp_path / "run") == undisturbed[num_processes]


@pytest.mark.parametrize("num_processes", [1, *slow([2])])
def test_usr2_during_the_start_saves_after_the_first_step(
    tmp_path: Path, undisturbed: dict[int, dict[str, bytes]], num_processes: int
) -> None:
    job = start(tmp_path, num_processes, pauses_at_start=True)
    wait_until_paused(job, tmp_path)
    os.kill(job.processes[-1].pid or 0, signal.SIGUSR2)
    go_on(tmp_path)
    assert job.wait() == [0] * num_processes, job.output()
    assert saves(tmp_path) == [1, *DUE[num_processes]]
    assert final_files(tmp_path / "run") == undisturbed[num_processes]


def test_usr2_to_the_process_group_leaves_data_workers_alive(tmp_path: Path) -> None:
    job = start(tmp_path, 1, pause_at=1, in_group=True, num_workers=2)
    wait_until_paused(job, tmp_path)
    os.killpg(int((tmp_path / "leader").read_text()), signal.SIGUSR2)
    go_on(tmp_path)
    assert job.wait() == [0], job.output()
    assert saves(tmp_path) == [1, *DUE[1]]


def test_a_requested_save_that_is_due_anyway_is_made_once(tmp_path: Path) -> None:
    job = start(tmp_path, 1, pause_at=2, checkpoint=CheckpointConfig(every_n_steps=1))
    wait_until_paused(job, tmp_path)
    for _ in range(3):
        os.kill(job.processes[0].pid or 0, signal.SIGUSR2)
    go_on(tmp_path)
    assert job.wait() == [0], job.output()
    assert saves(tmp_path) == [*range(1, 11)]


def test_a_stop_wins_over_a_requested_save(tmp_path: Path) -> None:
    job = start(tmp_path, 2, pause_at=1)
    wait_until_paused(job, tmp_path)
    os.kill(job.processes[0].pid or 0, signal.SIGUSR2)
    os.kill(job.processes[1].pid or 0, signal.SIGTERM)
    go_on(tmp_path)
    assert job.wait() == [75, 75], job.output()
    assert saves(tmp_path) == [2]


def test_the_launcher_forwards_usr2_and_lives(tmp_path: Path) -> None:
    job = processes.start(launch_child, tmp_path, sys.executable, folder=tmp_path / "logs")
    wait_until_paused(job, tmp_path)
    os.kill(job.processes[0].pid or 0, signal.SIGUSR2)
    go_on(tmp_path)
    assert job.wait() == [0], job.output()
    assert saves(tmp_path) == [1, *DUE[1]]


def launch_child(folder: Path, python: str) -> None:
    sys.executable = python
    os.environ["ACCELERATE_USE_CPU"] = "true"
    script = folder / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.faults.test_save_signals import child\n"
        f"child(Path({str(folder)!r}), pause_at=1)\n"
    )
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = root
    sys.exit(launch.main([str(script)]))


def run(folder: Path, callbacks: Sequence[Callback] = (), **changes: Any) -> list[str]:
    """Train here; return the checkpoints that were left."""
    config = workload.make_config(
        folder, checkpoint=CheckpointConfig(every_n_epochs=3, keep_last_n=9)
    )
    workload.train(
        replace(config, trainer=replace(config.trainer, **changes)), callbacks=tuple(callbacks)
    )
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_usr2_in_an_evaluation_saves_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second epoch, where no save is due: the first had the best, that is largest,
    loss."""
    changes: dict[str, Any] = {
        "num_epochs": 3,
        "ema_decay": None,
        "monitor": "eval/loss",
        "monitor_mode": "max",
    }
    assert [name[5:15] for name in run(tmp_path / "whole", **changes)] == [
        f"{step:010d}" for step in (5, 15)
    ]
    monkeypatch.setattr(workload, "MeanLoss", SignalInEvaluation)
    assert run(tmp_path / "asked", [ArmsTheSignal()], **changes) == [
        f"step-{step:010d}-epoch-{epoch:05d}" for step, epoch in ((5, 1), (10, 2), (15, 3))
    ]


class Asks(Callback):
    """Requests a save after a step, on the last process only."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self._step and trainer.accelerator.is_last_process:
            trainer.request_save()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_callback_may_request_a_save_on_one_process(tmp_path: Path, num_processes: int) -> None:
    processes.run(ask, tmp_path, num_processes=num_processes, folder=tmp_path / "logs")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names[0] == f"step-{num_processes:010d}-epoch-00000"


def ask(folder: Path) -> None:
    run(folder / "run", [Asks(1)])
