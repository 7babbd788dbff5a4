"""Checks this machine, and what importing the recipe does on it."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.wording import counted
from ...distributed.accelerator import uses_cpu
from ...distributed.machine import available_cpus
from .findings import Check, LaunchContext

_MIN_SHARED_BYTES = 1 << 30
_MIN_FILES = 1024
_ENOUGH_FILES = 65536  # where there is no limit, as on macOS
_SHARED_MEMORY = Path("/dev/shm")
# The versions that the whole suite has run with; the tables are in docs/scope.md.
TRIED_PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
TRIED_TORCH = ("2.11", "2.13", "2.15")
_FIRST_IMPORT = re.compile(r"^(?:import|from) (accel_trainer|torch|accelerate|timm)", re.MULTILINE)
_HAS_TF32 = (8, 0)  # CUDA's compute capability


def find_small_shared_memory(now: LaunchContext) -> str | None:
    """Data workers and NCCL have shared memory."""
    if not _SHARED_MEMORY.is_dir():
        return None
    size = shutil.disk_usage(_SHARED_MEMORY).total
    if size >= _MIN_SHARED_BYTES:
        return None
    return (
        f"{_SHARED_MEMORY} has {size >> 20} MiB, and data workers (num_workers > 0) and NCCL die "
        "of a bus error when it is full: start the container with --shm-size 8g or --ipc host"
    )


def find_few_files(now: LaunchContext) -> str | None:
    """Data workers can open enough files."""
    if importlib.util.find_spec("resource") is None:  # Windows, which has no such limit
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _MIN_FILES or soft == resource.RLIM_INFINITY:
        return None
    fact = f"a process may open only {soft} files, too few for data workers"
    enough = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else hard
    return f"{fact}: run `ulimit -n {enough}` before the launch"


def find_threads(now: LaunchContext) -> str | None:
    """There is a core for every thread."""
    num_threads = now.config.runtime.num_threads or 1
    num_processes = now.num_local_processes
    num_cpus = available_cpus()
    if num_threads * num_processes <= num_cpus:
        return None
    threads = f"{counted(num_processes, 'process')} of {counted(num_threads, 'thread')}"
    fact = f"{threads} on {counted(num_cpus, 'core')}"
    fix = f"set --runtime.num-threads {max(1, num_cpus // num_processes)}"
    if num_processes > num_cpus:
        fix += " and launch fewer processes"
    return f"{fact}: {fix}"


def find_touched_cuda(now: LaunchContext) -> str | None:
    """CUDA is not used before the processes are started."""
    if not torch.cuda.is_initialized():
        return None
    return (
        "importing the recipe uses CUDA, so no process can be forked, for data or from a notebook: "
        "move that code (.cuda(), torch.cuda...) into train()"
    )


def find_late_import(now: LaunchContext) -> str | None:
    """With several threads on a CPU, accel_trainer is imported before torch."""
    found = _FIRST_IMPORT.search(now.source)
    num_threads = now.config.runtime.num_threads or torch.get_num_threads()
    if found is None or found[1] == "accel_trainer" or not uses_cpu() or num_threads == 1:
        return None
    return (
        f"the recipe imports {found[1]} before accel_trainer, so threads keep their cores while "
        "they wait, and steps take several times as long where anything else runs: import "
        "accel_trainer first, or set OMP_WAIT_POLICY=passive"
    )


def find_untried_python(now: LaunchContext) -> str | None:
    """The tests have run with this version of Python."""
    return _untried("Python", platform.python_version(), TRIED_PYTHON)


def find_untried_torch(now: LaunchContext) -> str | None:
    """The tests have run with this version of torch."""
    return _untried("torch", torch.__version__, TRIED_TORCH)


def _untried(name: str, version: str, tried: Sequence[str]) -> str | None:
    if version.startswith(tuple(f"{minor}." for minor in tried)):
        return None
    return f"{name} {version} has not been tried: the tests ran with {', '.join(tried)}"


def find_idle_tensor_cores(now: LaunchContext) -> str | None:
    """A GPU with tensor cores uses them."""
    runtime = now.config.runtime
    precision = runtime.mixed_precision or now.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    has_gpu = not uses_cpu() and torch.cuda.device_count() > 0
    if not has_gpu or precision != "no" or runtime.tf32:
        return None
    if torch.cuda.get_device_capability() < _HAS_TF32:
        return None
    fact = "float32 without TF32 does not use this GPU's tensor cores"
    return f"{fact}: add --mixed-precision bf16, or --runtime.tf32"


CHECKS = (
    Check("PYTHON_UNTRIED", "warning", find_untried_python),
    Check("TORCH_UNTRIED", "warning", find_untried_torch),
    Check("TENSOR_CORES", "warning", find_idle_tensor_cores),
    Check("SHARED_MEMORY", "warning", find_small_shared_memory),
    Check("OPEN_FILES", "warning", find_few_files),
    Check("THREADS", "warning", find_threads),
    Check("CUDA_TOUCHED", "error", find_touched_cuda),
    Check("IMPORT_ORDER", "warning", find_late_import),
)
