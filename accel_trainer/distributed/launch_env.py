"""The launcher's environment variables, in torch's names: ranks, processes, rendezvous address."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

from ..core.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# SLURM's names for a step. A batch script, which is not a task of a step, has those of the job.
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # Open MPI, and MPICH and Intel MPI
MAX_THREADS = 1024  # a million threads crash the process
# Set by torchrun and by accelerate's launcher.
_LAUNCHERS = {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND"}
_FIX = "start with torchrun, accelerate launch or srun; or unset RANK, WORLD_SIZE and LOCAL_RANK"


def setup_launch_env() -> int:
    """Check the launcher's variables, and return the number of processes; 1 without a launcher.

    srun's variables are first translated to torch's, which are set in `os.environ`. A second call
    finds them there.

    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    environment = os.environ
    if not {"RANK", "WORLD_SIZE"} & environment.keys():
        if set(_SRUN) <= environment.keys():
            _translate_srun()
        elif {environment.get(name, "1") for name in _MPI} != {"1"}:
            raise ConfigError("LAUNCH", f"the variables of mpirun and mpiexec are not read: {_FIX}")
    if not set(_NAMES[:3]) & environment.keys():
        if {"MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"} <= environment.keys():
            raise ConfigError(
                "LAUNCH",
                "accelerate announced several processes but started one, "
                "as it does without GPUs and with --cpu: "
                "start with accel-trainer launch --cpu --num_processes N, "
                "or with --config_file accelerate_configs/multi_cpu.yaml",
            )
        return 1
    num_processes = _number("WORLD_SIZE")
    # With LOCAL_RANK, accelerate joins a group even of one process.
    if num_processes != 1 or "LOCAL_RANK" in environment:
        missing = [
            name
            for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            if not environment.get(name)
        ]
        if missing:
            raise ConfigError(
                "LAUNCH", f"WORLD_SIZE is {num_processes} without {', '.join(missing)}: {_FIX}"
            )
        limits = {"RANK": num_processes, "LOCAL_RANK": num_processes, "MASTER_PORT": 2**16}
        for name, limit in limits.items():
            if _number(name) >= limit:
                raise ConfigError(
                    "LAUNCH", f"{name} is {environment[name]}, but must be below {limit}: {_FIX}"
                )
    return num_processes


def find_launcher() -> int | None:
    """Return the process id of the launcher, None without one: this process must end with it.

    accelerate's launcher (1.15) leaves processes behind when it is stopped or killed. A shell is
    not a launcher.
    """
    return os.getppid() if {*_LAUNCHERS, "ACCEL_TRAINER_LAUNCHER"} & os.environ.keys() else None


def error_file() -> Path | None:
    """Return the file whose message torchrun shows last for a failed process; None: it has none."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def count_local_processes() -> int:
    """Return the number of processes of the launch on this machine.

    Raises ConfigError if LOCAL_WORLD_SIZE is not a number.
    """
    return max(1, _number("LOCAL_WORLD_SIZE")) if os.environ.get("LOCAL_WORLD_SIZE") else 1


def given_num_threads() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it, not torchrun or accelerate's launcher."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    if _LAUNCHERS & os.environ.keys() or not value.isdecimal():
        return None
    if int(value) > MAX_THREADS:
        raise ConfigError("LAUNCH", f"OMP_NUM_THREADS is {value}: set it to 1 to {MAX_THREADS}")
    return int(value) or None


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError("LAUNCH", f"{name} is {value or 'not set'}, but must be a number: {_FIX}")
    return int(value)


def _translate_srun() -> None:
    """Set torch's variables from those of srun; an address or a port that is set stays."""
    environment = os.environ
    rank, num_processes, local_rank = map(_number, _SRUN[:3])
    local_processes = _tasks_of_node(environment[_SRUN[3]], _number("SLURM_NODEID"))
    first = "127.0.0.1"
    if local_processes != num_processes:
        first = _first_host(environment["SLURM_STEP_NODELIST"])
    # All processes choose the same port, and jobs that share a machine different ones.
    job = environment.get("SLURM_JOB_ID", "") + environment.get("SLURM_STEP_ID", "")
    values = map(str, (rank, num_processes, local_rank, local_processes))
    environment.update(zip(_NAMES, values, strict=True))
    environment.setdefault("MASTER_ADDR", first)
    environment.setdefault("MASTER_PORT", str(20_000 + zlib.crc32(job.encode()) % 10_000))


def _tasks_of_node(counts: str, node: int) -> int:
    """Return the task count of `node` from SLURM's notation: `4(x2),3` means 4, 4 and 3."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in parts for _ in range(int(times or 1))][node]


def _first_host(nodes: str) -> str:
    """Return the first host in SLURM's notation: `gpu01` of `gpu[01-03,07],login`."""
    ((head, numbers, tail), *_) = re.findall(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    return f"{head}{re.split('[-,]', numbers)[0]}{tail}"
