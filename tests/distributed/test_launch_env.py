"""Whatever launched the processes, each knows which one it is; a contradiction is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from accel_trainer import ConfigError
from accel_trainer.distributed.launch_env import (
    count_local_processes,
    find_launcher,
    setup_launch_env,
)

from .. import processes
from ..joined import joined_processes

TORCH = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def like_srun(rank: int, num_processes: int, *, nodes: str = "localhost") -> dict[str, str]:
    """What the srun of SLURM 22.05 sets in a step of two tasks per node."""
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_NTASKS": "99",  # of the job, not of the step
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NUM_TASKS": str(num_processes),
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{num_processes // 2})" if num_processes > 2 else "2",
        "SLURM_STEP_NODELIST": nodes,
    }


def found(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> tuple[int, dict[str, str]]:
    """Return how many processes a launch with these variables has, and torch's variables then."""
    monkeypatch.setattr(os, "environ", environment := dict(environment))
    num_processes = setup_launch_env()
    return num_processes, {name: environment[name] for name in TORCH if name in environment}


def test_a_launcher_that_sets_torchs_variables_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, {}) == (1, {})
    assert found(monkeypatch, TORCH) == (4, TORCH)
    assert found(monkeypatch, {**like_srun(0, 2), **TORCH}) == (4, TORCH)
    assert found(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})[0] == 1


def test_jobs_that_share_a_machine_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in ("1", "2"):
        ranks = [
            found(monkeypatch, {**like_srun(rank, 2), "SLURM_JOB_ID": job})[1] for rank in (0, 1)
        ]
        assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
        ports.add(ranks[0]["MASTER_PORT"])
    assert len(ports) == 2
    assert all(1024 < int(port) < 32_768 for port in ports), "below those that systems give away"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[01-03,07],login", "gpu01"), ("gpu[3,5]-ib", "gpu3-ib"), ("a,b", "a"), ("one", "one")],
)
def test_srun_says_all_but_the_port(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    num_processes, mine = found(monkeypatch, like_srun(3, 8, nodes=nodes))
    assert num_processes == 8
    assert (mine["RANK"], mine["LOCAL_RANK"], mine["LOCAL_WORLD_SIZE"]) == ("3", "1", "2")
    assert mine["MASTER_ADDR"] == first
    uneven = {**like_srun(3, 8), "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}
    assert found(monkeypatch, uneven)[1]["LOCAL_WORLD_SIZE"] == "2"
    # With its MPI support srun sets some variables of MPICH's, and not where a process is on its
    # machine.
    also_mpi = {**like_srun(3, 8), "PMI_RANK": "3", "PMI_SIZE": "8"}
    assert found(monkeypatch, also_mpi)[1]["LOCAL_RANK"] == "1"


def test_a_batch_script_is_not_one_of_its_jobs_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python recipe.py` in it, without srun, is one process and must not wait for others."""
    script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert found(monkeypatch, script) == (1, {})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TORCH, "MASTER_ADDR": ""}, "WORLD_SIZE is 4 without MASTER_ADDR"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but must be a number: .* or unset RANK"),
        ({"LOCAL_RANK": "0"}, "WORLD_SIZE is not set, but must be a number: .* or unset RANK"),
        (
            {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"},
            "WORLD_SIZE is 1 without MASTER_ADDR, MASTER_PORT: sta",
        ),
        ({**TORCH, "RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0, but must be below 0"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "the variables of mpirun and mpiexec are not read"),
        ({"PMI_SIZE": "2"}, "the variables of mpirun and mpiexec are not read"),
        ({**TORCH, "WORLD_SIZE": "many"}, "WORLD_SIZE is many, but must be a number"),
        ({**TORCH, "RANK": "4"}, "RANK is 4, but must be below 4"),
        ({**TORCH, "MASTER_PORT": "http"}, "MASTER_PORT is http, but must be a number"),
        (
            # What `accelerate launch --cpu --num_processes 2` sets (accelerate 1.15).
            {
                "ACCELERATE_DYNAMO_BACKEND": "no",
                "ACCELERATE_USE_CPU": "True",
                "MASTER_ADDR": "127.0.0.1",
            },
            "accelerate announced several processes but started one, .*"
            " accel-trainer launch --cpu --num_processes N, .* --config_file",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(monkeypatch, environment)


def test_a_process_knows_the_launcher_that_it_must_not_outlive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert find_launcher() is None
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "none"})
    assert find_launcher() == os.getppid()
    monkeypatch.setattr(os, "environ", {"ACCEL_TRAINER_LAUNCHER": "launch"})
    assert find_launcher() == os.getppid()


def test_processes_of_this_machine_are_counted_by_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, number in (("", 1), ("0", 1), ("4", 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert count_local_processes() == number
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "some")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is some, but must be a number"):
        count_local_processes()


def test_ranks_started_by_hand_as_srun_would_find_each_other(tmp_path: Path) -> None:
    job = processes.start(add_up, num_processes=2, folder=tmp_path, variables=like_srun)
    assert job.wait() == [0, 0], job.output()


def add_up() -> None:
    with joined_processes() as accelerator:
        assert accelerator.num_processes == 2
        assert accelerator.reduce(torch.tensor(accelerator.process_index + 1), "sum") == 3
