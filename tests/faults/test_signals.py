"""Signals to real runs and to their launchers: some cases of `signals`, and what it leaves out."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from accel_trainer import RecipeConfig, main
from accel_trainer.fault_tolerance import watchdog
from tests import processes, workload
from tests.faults import signals
from tests.faults.signals import Case, is_alive, wait_for
from tests.programs.faults import act_in_call
from tests.training.test_exactness import final_files
from tests.variants import slow, slow_but

pytestmark = pytest.mark.signal


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("whole")
    return {n: signals.run_undisturbed(folder / str(n), n) for n in (1, 2)}


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("case", slow_but(signals.shown_cases(), signals.some_cases()), ids=str)
def test_a_signal_loses_nothing_and_leaves_nothing(
    case: Case, tmp_path: Path, undisturbed: dict[int, dict[str, bytes]]
) -> None:
    """Fault (Signals and processes): SIGTERM, SIGINT or SIGUSR1 during a step -> all processes
    finish the same step, save one checkpoint and exit with code 75 (`preempted`); the resumed
    run gives identical results

    Fault (Signals and processes): a signal during a save -> the save is completed

    Fault (Signals and processes): SIGUSR1 to the launcher -> `accel-trainer launch` forwards it;
    accelerate's own launcher dies of it
    """
    signals.run_case(case, tmp_path / "case", undisturbed[case.num_processes])


@pytest.mark.parametrize(
    ("num_processes", "number"),
    [(2, signal.SIGKILL), *slow([(1, signal.SIGTERM), (1, signal.SIGKILL), (2, signal.SIGTERM)])],
)
def test_a_run_whose_launcher_dies_saves_and_ends(
    tmp_path: Path, number: int, num_processes: int
) -> None:
    """A killed launcher of accelerate leaves all processes behind, a terminated one only one.

    Fault (Signals and processes): the launcher is terminated or killed -> the processes notice,
    save and exit; no orphan is left
    """
    launcher = processes.start(launch_with_accelerate, tmp_path, num_processes, folder=tmp_path)
    ready = [tmp_path / f"ready-{rank}" for rank in range(num_processes)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in ready))
    os.kill(launcher.processes[0].pid or 0, number)
    if num_processes == 1 or number == signal.SIGKILL:
        launcher.wait()  # two processes are waited for by a launcher that is terminated
    signals.go_on(tmp_path)  # the pause is in a step: the watchdog notices, and sends a signal
    wait_for(lambda: not any(is_alive(int(path.read_text())) for path in ready))
    assert not [path for path in ready if is_alive(int(path.read_text()))], launcher.output()
    launcher.wait()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert status["optimizer_step"] < 6


def launch_with_accelerate(folder: Path, num_processes: int) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    shape = (
        ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
        if num_processes > 1
        else []
    )
    sys.argv = [
        "accelerate launch",
        *shape,
        "-m",
        "tests.faults.signals",
        "--child",
        str(folder),
        "--phase",
        "step",
    ]
    runpy.run_module("accelerate.commands.launch", run_name="__main__")


@pytest.mark.parametrize(
    ("num_processes", "timeout_s", "suspended_s"), [(1, 0.5, 5.0), (2, 60.0, 1.5)]
)
def test_a_process_that_is_suspended_for_a_while_does_not_count_as_stuck(
    tmp_path: Path,
    num_processes: int,
    timeout_s: float,
    suspended_s: float,
    undisturbed: dict[int, dict[str, bytes]],
) -> None:
    """One alone for longer than it may be stuck; one of two for less than the other waits.

    Fault (Signals and processes): a process is suspended and resumed -> the run continues: a
    suspended process does not count as stuck, and the others wait up to `--runtime.timeout-s`
    """
    job = processes.start(
        train_suspended,
        tmp_path,
        timeout_s,
        num_processes=num_processes,
        folder=tmp_path / "logs",
    )
    last = psutil.Process(job.processes[-1].pid)
    wait_for(lambda: last.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    time.sleep(suspended_s)
    last.resume()
    assert job.wait() == [0] * num_processes, job.output()
    assert final_files(tmp_path / "run") == undisturbed[num_processes]


def suspend() -> None:
    """Suspend this process; the watchdog looks before, and after but before there is progress."""
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)


def train_suspended(folder: Path, timeout_s: float) -> None:
    watchdog._INTERVAL_S = 0.02
    if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        signals.pause_in("step", suspend)
    config = workload.make_config(folder / "run")
    workload.train(
        replace(
            config, runtime=replace(config.runtime, timeout_s=timeout_s, stuck_timeout_s=timeout_s)
        ),
        dropout=0.1,
        callbacks=(signals.StepLog(folder),),
    )


def test_without_a_launcher_the_end_of_the_parent_is_no_signal(tmp_path: Path) -> None:
    """As under nohup: the shell that started the run ends in the middle of it."""
    processes.run(start_and_leave, tmp_path, folder=tmp_path / "logs")
    time.sleep(1.2)
    (tmp_path / "go").touch()
    wait_for((tmp_path / "run" / "result.json").exists)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["state"] == "done"


def start_and_leave(folder: Path) -> None:
    if os.fork() == 0:
        signals.child(str(folder), "step")
    wait_for((folder / "ready-0").exists)


def test_a_signal_before_there_are_handlers_is_a_preemption(tmp_path: Path) -> None:
    job = processes.start(launch_sleeper, str(tmp_path), folder=tmp_path)
    wait_for((tmp_path / "up").exists)
    os.kill(job.processes[0].pid or 0, signal.SIGUSR1)
    assert job.wait() == [75]


def launch_sleeper(folder: str) -> None:
    from accel_trainer.cli import launch

    script = Path(folder) / "sleeper.py"
    script.write_text(f"import time\nopen('{folder}/up', 'w')\ntime.sleep(60)\n")
    sys.exit(launch.main([str(script)]))


@pytest.mark.parametrize("code", [65, *slow([0, 3])])
def test_the_launcher_ends_with_the_code_of_the_run(tmp_path: Path, code: int) -> None:
    processes.run(launch_exit, str(tmp_path), code, folder=tmp_path, codes=[code])


def launch_exit(folder: str, code: int) -> None:
    from accel_trainer.cli import launch

    script = Path(folder) / "script.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    sys.exit(launch.main([str(script)]))


def test_the_launcher_leaves_its_processes_the_time_to_save(tmp_path: Path) -> None:
    """Fault (Signals and processes): the launcher kills its processes before a save is done -> the
    previous checkpoint remains; `accel-trainer launch` waits 300 s
    """
    job = processes.run(launch_to_see, tmp_path, folder=tmp_path)
    assert job.output().splitlines()[-1] == "300"  # torch's own would be 30


def launch_to_see(folder: Path) -> None:
    from accel_trainer.cli import launch

    script = folder / "script.py"
    script.write_text("import os\nprint(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])\n")
    sys.exit(launch.main([str(script)]))


def test_a_signal_to_the_process_group_leaves_data_workers_alive(
    tmp_path: Path,
) -> None:
    """A worker holds back the batch that the step waits for.

    Fault (Signals and processes): a signal to the process group, including data workers -> the
    workers ignore it and end together with their training process
    """
    job = processes.start(train_with_workers, tmp_path, folder=tmp_path / "logs", has_workers=True)
    wait_for((tmp_path / "ready-0").exists)
    os.killpg(job.processes[0].pid or 0, signal.SIGTERM)
    signals.go_on(tmp_path)
    assert job.wait() == [75], job.output()


def train_with_workers(folder: Path) -> None:
    os.setpgid(0, 0)
    signals.note_signals(folder, 0)
    multiprocessing.set_start_method("fork", force=True)  # so that workers have the pause
    act_in_call(workload.Bars, "__getitem__", 20, lambda: signals.pause(folder, 0))
    main(
        lambda _: workload.train(workload.make_config(folder / "run"), num_workers=2),
        RecipeConfig,
        description="",
        argv=[],
    )


def test_ctrl_c_on_a_terminal_reaches_launcher_and_run_and_counts_once(tmp_path: Path) -> None:
    """Use a real interpreter: a forked one has another group and may get both signals as one."""
    job = processes.start(launch_in_own_group, tmp_path, sys.executable, folder=tmp_path / "logs")
    wait_for((tmp_path / "ready-0").exists)
    os.killpg(job.processes[0].pid or 0, signal.SIGINT)
    signals.go_on(tmp_path)
    assert job.wait() == [75], job.output()


def launch_in_own_group(folder: Path, python: str) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.launch(Case("INT", "step", "launcher", 1), str(folder), python)
