"""A launcher that restarts processes: whichever die, and whenever, the run ends with the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes, workload
from tests.test_exactness import final_files

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # four starts of two processes
def test_a_worker_killed_three_times_under_torchrun_changes_no_bit(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "3"]
    recipe = ["-m", "tests.distributed.elastic", str(tmp_path / "killed")]
    done = subprocess.run(
        [*launcher, *recipe, "--kill", "step-2", "start", "step-4"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continuing after step") == 2
    assert "rank 1, step 2, " in done.stderr
    assert "rank 1, step 4, " in done.stderr
    processes.run(train, tmp_path / "whole", num_processes=2, folder=tmp_path / "logs")
    assert final_files(tmp_path / "killed") == final_files(tmp_path / "whole")


def train(folder: Path) -> None:
    workload.train(workload.make_config(folder))
