"""Every signal in every phase to every receiver: nothing is lost or left behind, the run goes on.

A run pauses in a phase, gets a signal there and goes on; it is then judged by what it leaves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer import Callback, ClassificationTask, RecipeConfig, main
from accel_trainer.checkpoint import manager
from accel_trainer.vision import AugmentedImageReader
from tests import processes, workload
from tests.programs.faults import act_in_call
from tests.training.test_exactness import final_files

SIGNALS = ("TERM", "INT", "USR1", "HUP")
PHASES = ("start", "data", "step", "evaluation", "save")
PAUSE_AT_STEP = 4  # of 10 with one process, of 6 with two


@dataclass(frozen=True)
class Case:
    signal: str
    phase: str
    receiver: str
    num_processes: int

    def __str__(self) -> str:
        return f"{self.signal}-{self.phase}-{self.receiver}-{self.num_processes}"


def some_cases() -> list[Case]:
    """Return each signal in each phase, receivers in turn, and each to a launcher in one phase."""
    pairs = itertools.product(SIGNALS, PHASES)
    cases = [Case(*pair, ("rank", "group")[i % 2], 1 + i // 2 % 2) for i, pair in enumerate(pairs)]
    launched = zip(SIGNALS, ("start", "evaluation", "save", "step"), (1, 2, 2, 1), strict=True)
    return cases + [Case(number, phase, "launcher", count) for number, phase, count in launched]


def shown_cases() -> list[Case]:
    """Of these, as few as have every signal, phase and receiver in them."""
    return [
        Case("TERM", "start", "rank", 1),
        Case("USR1", "data", "group", 2),
        Case("INT", "step", "group", 2),
        Case("HUP", "evaluation", "rank", 2),
        Case("INT", "evaluation", "launcher", 2),
        Case("TERM", "save", "rank", 1),
    ]


# --- inside the run ---


class StepLog(Callback):
    """Writes down each finished step at once, so that a lost one shows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "steps"

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if trainer.accelerator.is_main_process:
            with self._path.open("a") as file:
                file.write(f"{report.optimizer_step}\n")


def child(folder: str, phase: str | None, in_group: bool = False) -> None:
    """Run the workload, in the process of one rank, pausing once in `phase`."""
    for number in SIGNALS:  # whoever runs the tests may ignore some, as a background job does
        signal.signal(getattr(signal, f"SIG{number}"), signal.SIG_DFL)
    run = Path(folder) / "run"
    control = Path(folder)
    rank = int(os.environ.get("RANK", 0))
    note_signals(control, rank)
    if in_group:
        join_group(control, rank)
    if phase is not None:
        pause_in(phase, lambda: pause(control, rank))
    main(
        lambda _: workload.train(
            workload.make_config(run), dropout=0.1, callbacks=(StepLog(control),)
        ),
        RecipeConfig,
        description="",
        argv=[],
    )


def note_signals(control: Path, rank: int) -> None:
    """Let the system write each signal that this process handles to `heard-RANK` as it comes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    signal.set_wakeup_fd(os.open(control / f"heard-{rank}", flags))


def join_group(control: Path, rank: int) -> None:
    leader = control / "leader"
    if rank == 0:
        os.setpgid(0, 0)
        leader.write_text(str(os.getpid()))
    wait_for(lambda: leader.exists() and leader.read_text() != "")
    os.setpgid(0, int(leader.read_text()))


def pause(control: Path, rank: int) -> None:
    (control / f"ready-{rank}").write_text(str(os.getpid()))
    wait_for((control / "go").exists)


def wait_for(condition: Callable[[], Any], timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def pause_in(phase: str, act: Callable[[], None]) -> None:
    """Call `act` the moment the run is in `phase`."""
    owner, name, number = {
        "start": (workload, "SmallNet", 1),
        "data": (AugmentedImageReader, "finish", PAUSE_AT_STEP),
        "step": (ClassificationTask, "step", PAUSE_AT_STEP),
        "evaluation": (ClassificationTask, "eval_step", 4),  # the first two are trials at the start
        "save": (manager, "write_checkpoint", PAUSE_AT_STEP),
    }[phase]
    act_in_call(owner, name, number, act)


# --- outside ---


def go_on(control: Path) -> None:
    """End the pause, once a process of the run has the signal: a launcher takes time for it."""
    wait_for(lambda: any(path.stat().st_size for path in control.glob("heard-*")))
    (control / "go").touch()


def start(case: Case, folder: Path) -> processes.Job:
    if case.receiver == "launcher":
        return processes.start(launch, case, str(folder), sys.executable, folder=folder / "logs")
    arguments = (str(folder), case.phase, case.receiver == "group")
    return processes.start(
        child, *arguments, num_processes=case.num_processes, folder=folder / "logs"
    )


def launch(case: Case, folder: str, python: str) -> None:
    from accel_trainer.cli import launch

    sys.executable = python  # with which it starts the run
    os.environ["ACCELERATE_USE_CPU"] = "true"
    shape = (
        ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
        if case.num_processes > 1
        else []
    )
    sys.exit(
        launch.main(
            [*shape, "-m", "tests.faults.signals", "--child", folder, "--phase", case.phase]
        )
    )


def run_case(case: Case, folder: Path, undisturbed: dict[str, bytes]) -> None:
    """Run a case, and assert all promises."""
    folder.mkdir()
    job = start(case, folder)
    # Only the main process saves: in that phase it alone pauses.
    ranks = range(1 if case.phase == "save" else case.num_processes)
    ready = [folder / f"ready-{rank}" for rank in ranks]
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in ready))
    except AssertionError:
        raise AssertionError(job.output()) from None
    number = getattr(signal, f"SIG{case.signal}")
    if case.receiver == "group":
        os.killpg(int((folder / "leader").read_text()), number)
    else:
        os.kill(job.processes[-1].pid or 0, number)  # the launcher, or the last rank
    go_on(folder)
    codes = job.wait()
    output = "\n".join(job.output(rank) for rank in range(len(codes)))

    assert codes == [75] * len(codes), f"{codes}\n{output}"
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75), status
    done = (folder / "steps").read_text().split() if (folder / "steps").exists() else ["0"]
    last_commit = status["last_commit"] or "step-0-"
    assert int(last_commit.split("-")[1]) == int(done[-1]) == status["optimizer_step"], (
        done,
        status,
    )
    assert not [p for p in (int(path.read_text()) for path in ready) if is_alive(p)]
    processes.run(
        child, str(folder), None, num_processes=case.num_processes, folder=folder / "resume-logs"
    )
    assert final_files(folder / "run") == undisturbed


def is_alive(pid: int) -> bool:
    """Return whether a process still runs in a minute; a zombie does not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def run_undisturbed(folder: Path, num_processes: int) -> dict[str, bytes]:
    folder.mkdir()
    processes.run(child, str(folder), None, num_processes=num_processes, folder=folder / "logs")
    return final_files(folder / "run")


def command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", required=True)
    parser.add_argument("--phase")
    options = parser.parse_args()
    child(options.child, options.phase)


if __name__ == "__main__":
    command_line()
