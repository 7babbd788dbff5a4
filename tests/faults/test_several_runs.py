"""Ctrl-C and other signals in a program of several runs: some cases of `several_runs`."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer import Preempted, RecipeConfig, launch, main
from tests import processes
from tests.faults import several_runs
from tests.faults.several_runs import Case, any_case, program
from tests.variants import slow

pytestmark = pytest.mark.signal


@pytest.mark.parametrize(
    "case",
    [
        Case("folds", "step", "INT", number=3),
        Case("folds", "start", "TERM", 2, is_to_all=False),
        Case("trials", "data", "TERM", number=60, is_quiet=False),
        Case("models", "evaluation", "INT", 2, is_to_all=False),
        Case("loops", "block", "HUP"),
        Case("folds", "end", "USR1", 2, is_to_all=False, is_quiet=False),
        Case("models", "between", "TERM"),
        *slow(any_case(random.Random(seed)) for seed in range(12)),
    ],
    ids=str,
)
def test_no_run_follows_a_signal_and_the_same_program_continues(tmp_path: Path, case: Case) -> None:
    """Fault (Signals and processes): a signal in a program of several runs, such as folds or the
    trials of a search -> no further run is started: the program (in a notebook, the cell) ends
    with one line and exit code 75; the same program continues, and finished runs return their
    results
    """
    whole = several_runs.run_whole(tmp_path / "whole", case.kind, case.num_processes)
    several_runs.run_case(case, tmp_path / "parts", whole)


def test_a_signal_ends_the_program_that_launched_the_run(tmp_path: Path) -> None:
    job = processes.run(launch_in_turn, tmp_path, folder=tmp_path, codes=[75])
    assert job.output().splitlines()[-1] == "preempted by SIGINT"
    assert not (tmp_path / "run-2").exists()


def launch_in_turn(folder: Path) -> None:
    try:
        launch(program, folder, "folds", Case("folds", "step", "INT"), num_processes=1)
    except Preempted as stop:
        print(f"{stop.result.state} by {stop.result.stop_reason}")
        raise


def test_a_recipe_of_several_runs_ends_with_its_usual_line(tmp_path: Path) -> None:
    job = processes.run(main_in_turn, tmp_path, folder=tmp_path, codes=[75])
    said = [line for line in job.output().splitlines() if "run the same command" in line]
    assert said == ["SIGTERM: saved step 1: run the same command to continue"]
    assert not (tmp_path / "run-2").exists()


def main_in_turn(folder: Path) -> None:
    case = Case("folds", "step", "TERM", is_quiet=False)
    main(lambda _: program(folder, "folds", case), RecipeConfig, description="", argv=[])


def test_a_script_ends_in_one_line_once_its_threads_have_ended() -> None:
    script = """
import sys, threading, time
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.fault_tolerance.preemption import StopFlag, program_stopped
sys.excepthook = lambda *error: print("a hook of somebody")
threading.Thread(target=lambda: time.sleep(0.3)).start()
flag = StopFlag()
with program_stopped(flag, Activity(), is_main=True, is_quiet=True):
    flag.request(15)
print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (75, "")
    said = "accel_trainer: SIGTERM: saved step 0: run the same command to continue\n"
    assert done.stderr == said
