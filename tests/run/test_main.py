"""One line from one process, whichever fails, and wherever in its life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer import RecipeConfig, RunResult, RuntimeConfig, main
from accel_trainer.distributed.accelerator import start_accelerator

from .. import processes

ROOT = Path(__file__).parents[2]


def test_a_process_that_fails_before_it_has_connected_reports_its_own_error(tmp_path: Path) -> None:
    job = processes.start(join_unless_mistaken, num_processes=2, folder=tmp_path)
    assert job.wait() == [70, 64]
    assert job.output(1).splitlines() == [
        "accel_trainer: process 1: error[CONFIG]: unknown flag --epoch: did you mean --epochs?"
    ]
    assert job.output(0).splitlines()[-1].startswith("accel_trainer: error[RENDEZVOUS]: process 0 of 2 did not")


def join_unless_mistaken() -> None:
    """As on two machines of which one has an old script."""
    main(join, RecipeConfig, description="", argv=["--epoch", "3"] if os.environ["RANK"] == "1" else [])


def join(config: RecipeConfig) -> RunResult:
    start_accelerator(RuntimeConfig(timeout_s=2))
    raise AssertionError("met nobody")


@pytest.mark.usefixtures("python_is_forked")
def test_a_mistake_that_all_processes_make_is_reported_once() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    run = subprocess.run(
        [*launcher, "recipes/minimal.py", "--epoch", "3"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    said = [line for line in run.stderr.splitlines() if line.startswith("accel_trainer: ")]
    assert said == ["accel_trainer: error[CONFIG]: unknown flag --epoch: did you mean --epochs?"], run.stderr
