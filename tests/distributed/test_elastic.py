"""A launcher that restarts processes: whichever die, and when, the final weights are the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accel_trainer import BatchConfig
from tests import processes, workload
from tests.ports import free_port
from tests.training.test_exactness import final_files, history, largest_difference
from tests.variants import slow

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize(
    "kills", [("step-2", "start"), *slow([(("step-2", "start", "step-4"),)])], ids=len
)
def test_a_worker_killed_several_times_under_torchrun_changes_no_bit(
    tmp_path: Path, kills: tuple[str, ...]
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nproc_per_node", "2", "--max_restarts", "3"]
    recipe = ["-m", "tests.distributed.elastic", str(tmp_path / "killed")]
    done = subprocess.run(
        [*launcher, *recipe, "--kill", *kills],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = [kill.removeprefix("step-") for kill in kills if kill != "start"]
    assert done.stdout.count("continuing after step") == len(steps)
    assert all(f"rank 1, step {step}, " in done.stderr for step in steps)
    processes.run(train, tmp_path / "whole", num_processes=2, folder=tmp_path / "logs")
    assert final_files(tmp_path / "killed") == final_files(tmp_path / "whole")


@pytest.mark.slow
def test_an_elastic_job_that_loses_a_machine_resumes_on_the_rest(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    recipe = [
        "-m",
        "tests.distributed.elastic",
        str(tmp_path / "run"),
        "--batch-size",
        "4",  # five steps an epoch, so that the loss comes in the middle of one
        "--samples",
        str(samples),
    ]
    port = free_port()
    staying = start_agent(port, *recipe)
    while not is_open(port):  # where they meet must be the machine that stays
        time.sleep(0.2)
    lost = start_agent(port, *recipe, "--kill", "machine-4")
    output, last_words = (agent.communicate()[0] for agent in (staying, lost))
    assert staying.returncode == 0, output
    assert lost.returncode == -signal.SIGKILL, last_words
    assert "4 x cpu" in output
    assert "2 x cpu" in output
    assert re.search("continuing after step [23]", output)
    processes.run(train_on_four, tmp_path / "whole", num_processes=4, folder=tmp_path / "logs")
    assert largest_difference(tmp_path / "run", tmp_path / "whole") <= 1e-9
    for mine, theirs in zip(history(tmp_path / "run"), history(tmp_path / "whole"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    kept = {row["step"]: row["attempt"] for row in sorted(rows, key=lambda row: row["attempt"])}
    assert list(kept.values()).count(1) >= 6, "two processes trained the rest"
    for epoch in (range(1, 6), range(6, 11)):
        trained = [
            row["samples"]
            for row in rows
            if row["step"] in epoch and row["attempt"] == kept[row["step"]]
        ]
        assert sorted(sum(trained, [])) == list(range(72)), "every sample of an epoch once"


def start_agent(port: int, *command: str) -> subprocess.Popen[str]:
    """Start a machine of a job that has at most two, and goes on with one."""
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nnodes", "1:2", "--nproc_per_node", "2", "--max_restarts", "3"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    launcher += ["--rdzv_id", "job"]
    launcher += ["--rdzv_conf", "last_call_timeout=20,keep_alive_interval=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def train_on_four(folder: Path) -> None:
    batch = BatchConfig(per_device_batch_size=4, eval_batch_size=10)
    workload.train(workload.make_config(folder, batch=batch), dtype=torch.float64)


def train(folder: Path) -> None:
    workload.train(workload.make_config(folder), dtype=torch.float64)
