"""`launch`: several processes from one plain script, and what comes back from them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ClassificationTask,
    ConfigError,
    DataError,
    DivergedError,
    Preempted,
    ProcessError,
    RunResult,
    StepOutput,
    StepReport,
    Trainer,
    launch,
)

from .. import processes, workload
from ..joined import joined_processes
from ..training.test_exactness import final_files


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def train(folder: Path) -> RunResult:
    return workload.train(workload.make_config(folder))


def test_launch_trains_as_any_other_launcher_and_hands_back_the_result(
    tmp_path: Path,
) -> None:
    result = launch(train, tmp_path / "launched", num_processes=2)
    assert isinstance(result, RunResult)
    assert (result.state, result.position.optimizer_step) == ("done", 6)
    processes.run(train, tmp_path / "other", num_processes=2, folder=tmp_path / "logs")
    assert final_files(tmp_path / "launched") == final_files(tmp_path / "other")
    # Again in one process, which is this one, and then again in two that are forked from it.
    for num_processes in (1, 2):
        finished = launch(train, tmp_path / "launched", num_processes=num_processes)
        assert finished.metrics == result.metrics


def test_launch_takes_any_function_and_processes_know_their_place() -> None:
    offset = 40

    def count(build: object) -> tuple[float, int, str]:
        with joined_processes() as accelerator:
            total = accelerator.reduce(torch.tensor(float(build())), "sum")
            return float(total) + offset, accelerator.num_processes, os.environ["LOCAL_WORLD_SIZE"]

    assert launch(count, lambda: 1, num_processes=3) == (43.0, 3, "3")
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()


def test_a_tensor_comes_back_from_a_process_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # it was closed, which the processes inherit
    monkeypatch.setattr(sys, "stderr", None)
    found = launch(lambda: [torch.arange(3), torch.zeros(1000, 1000)], num_processes=2)
    assert (found[0].tolist(), found[1].shape) == ([0, 1, 2], (1000, 1000))


def sum_by_accelerate() -> list[float]:
    return Accelerator().reduce(torch.tensor([1.0, 10.0]), "sum").tolist()


def test_an_accelerator_of_the_user_s_own_joins_the_launched_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or accelerate warns
    assert launch(sum_by_accelerate, num_processes=2) == [2.0, 20.0]


@pytest.mark.usefixtures("python_is_forked")
def test_a_process_that_launch_forks_late_can_use_several_threads() -> None:
    """As in a notebook. GNU's OpenMP would wait for ever for threads that were not forked along."""
    source = """
import torch
from accel_trainer import launch

def compute(size):
    torch.set_num_threads(2)
    return float(torch.ones(size, size).mm(torch.ones(size, size)).relu().mean())

torch.set_num_threads(2)
assert compute(600) == launch(compute, 600, num_processes=2) == 600
"""
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that Windows can."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])


@pytest.mark.usefixtures("spawns")
def test_a_run_whose_processes_are_spawned_is_the_run_that_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = launch(train, tmp_path / "spawned", num_processes=2)
    assert result.metrics["eval/loss"] > 0
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch(train, tmp_path / "forked", num_processes=2)
    assert final_files(tmp_path / "spawned") == final_files(tmp_path / "forked")


@pytest.mark.usefixtures("spawns")
def test_what_cannot_be_spawned_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="Windows cannot fork, and .*<lambda>.*: move"):
        launch(lambda: 1, num_processes=2)
    typed = type(fail)(fail.__code__, {"__name__": "__main__"}, "fail")
    with pytest.raises(ConfigError, match="Windows cannot fork, and "):
        launch(typed, num_processes=2)


def fail(error: BaseException, rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise error
    time.sleep(600)


def test_what_a_process_raises_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"error\[CODE\]: the fact, the fix"):
        launch(fail, DataError("CODE", "the fact, the fix"), 0, num_processes=2)
    assert capfd.readouterr().err == ""
    with pytest.raises(ProcessError, match="rank 1: ZeroDivisionError: by zero") as caught:
        launch(fail, ZeroDivisionError("by zero"), 1, num_processes=2)
    assert caught.value.rank == 1
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        launch(fail, SystemExit(3), 1, num_processes=2)
    assert ended.value.code == 3


def die(folder: Path) -> RunResult:
    from .elastic import KillAfterStep

    is_victim = os.environ.get("RANK") == "1"
    callbacks = (KillAfterStep(4),) if is_victim else ()
    return workload.train(workload.make_config(folder), callbacks=callbacks)


def kill(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="rank 1, step 4, .*: exited without an error report"):
        launch(die, tmp_path, num_processes=2)
    with pytest.raises(ProcessError, match=r"error\[KILLED\]: process 1 .* SIGKILL"):
        launch(kill, 1, num_processes=2)


def test_below_another_launcher_the_processes_are_there_already(tmp_path: Path) -> None:
    processes.run(check_below, num_processes=2, folder=tmp_path)


def check_below() -> None:
    pid = os.getpid()
    assert launch(os.getpid, num_processes=2) == pid


def test_one_process_is_this_one() -> None:
    assert launch(os.getpid, num_processes=1) == launch(os.getpid) == os.getpid()


def test_a_gpu_that_is_in_use_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_trainer.distributed.launch.uses_cpu", lambda: False)
    with pytest.raises(ConfigError, match="num_processes is 2, and there are 0 GPUs"):
        launch(os.getpid, num_processes=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA is in use in this process, .*: restart it"):
        launch(os.getpid, num_processes=2)
    with pytest.raises(ConfigError, match="num_processes is 0: set it to 1 or more, or None"):
        launch(os.getpid, num_processes=0)


@pytest.mark.parametrize("number", ["INT", "KILL"])
def test_the_processes_end_in_good_order_with_the_one_that_launched_them(
    tmp_path: Path, number: str
) -> None:
    job = processes.start(launch_slowly, tmp_path, folder=tmp_path, has_workers=True)
    steps = tmp_path / "steps"
    while not (steps.exists() and len(steps.read_text()) > 2):
        time.sleep(0.02)
    os.kill(job.processes[0].pid or 0, getattr(signal, f"SIG{number}"))
    job.wait()
    deadline_s = time.monotonic() + 600
    status = tmp_path / "run" / "status.json"
    while '"preempted"' not in status.read_text():
        assert time.monotonic() < deadline_s, job.output()
        time.sleep(0.1)
    if number == "INT":
        assert "preempted by SIG" in job.output()


def launch_slowly(folder: Path) -> None:
    from ..faults.signals import StepLog

    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = workload.make_config(folder / "run")
    config = replace(config, trainer=replace(config.trainer, num_epochs=10_000))
    try:
        launch(lambda: workload.train(config, callbacks=(StepLog(folder),)), num_processes=2)
    except Preempted as stop:
        print(f"{stop.result.state} by {stop.result.stop_reason}")


# --- what ends one process ends several ---


class Ends(Callback):
    """Does something in the process of the highest rank, in the second step."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == 2 and trainer.accelerator.is_last_process:
            self._act()


class TooLarge(ClassificationTask):
    """A task that needs more memory than there is."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise torch.OutOfMemoryError("CUDA out of memory")


def diverge() -> None:
    raise DivergedError("LOSS", "the loss is NaN")


def exit_early() -> None:
    raise SystemExit(5)


def signal_launcher(number: int) -> None:
    os.kill(int(os.environ["LAUNCHED_BY"]), number)


def run_and(act: Callable[[], object], folder: Path) -> RunResult:
    config = workload.make_config(folder)
    config = replace(config, batch=BatchConfig(global_batch_size=16, eval_batch_size=10))
    config = replace(config, trainer=replace(config.trainer, num_epochs=200))
    task = TooLarge() if act is os.getpid else None
    return workload.train(config, callbacks=(Ends(act),), task=task)


def wait_and(act: Callable[[], object], folder: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        act()
    time.sleep(600)


ENDINGS = {
    "INT": (run_and, partial(signal_launcher, signal.SIGINT)),
    "TERM": (run_and, partial(signal_launcher, signal.SIGTERM)),
    "HUP": (run_and, partial(signal_launcher, signal.SIGHUP)),
    "memory": (run_and, os.getpid),
    "diverged": (run_and, diverge),
    "exit": (wait_and, exit_early),
    "INT, no run": (wait_and, partial(signal_launcher, signal.SIGINT)),
    "TERM, no run": (wait_and, partial(signal_launcher, signal.SIGTERM)),
}


def end(name: str, num_processes: int, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["LAUNCHED_BY"] = str(os.getpid())
    function, act = ENDINGS[name]
    try:
        launch(function, act, folder / "run", num_processes=num_processes)
    except BaseException as error:
        # what Python would exit with
        print(f">>> {type(error).__name__} {getattr(error, 'exit_code', None)!r}", flush=True)
        raise
    print(">>> went on")


@pytest.mark.parametrize("name", ENDINGS)
def test_what_ends_one_process_ends_several_in_the_same_way(tmp_path: Path, name: str) -> None:
    ends = []
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        job = processes.start(end, name, num_processes, folder, folder=folder, has_workers=True)
        codes = job.wait()
        said = [line for line in job.output().splitlines() if line.startswith(">>>")]
        ends.append((codes, said))
    assert ends[0] == ends[1]
    assert ends[0] != ([0], [">>> went on"])
