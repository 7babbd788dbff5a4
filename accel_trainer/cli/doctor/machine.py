"""Checks this machine, its software and the config."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch

from ...callbacks.trackers import check_trackers
from ...distributed.machine import available_cpus
from ...run.preflight import Check, LaunchContext

_MIN_SHARED_BYTES = 1 << 30
_BATCHES_AHEAD = 2  # of each worker: torch's prefetch_factor
_IMAGE_BYTES = 3 * 224 * 224 * 4
_MIN_FILES = 1024
_SHARED_MEMORY = Path("/dev/shm")


def find_small_shared_memory(now: LaunchContext) -> str | None:
    """Data workers and NCCL have shared memory."""
    if not _SHARED_MEMORY.is_dir():
        return None
    disk, batch = shutil.disk_usage(_SHARED_MEMORY), now.config.batch
    if disk.total < _MIN_SHARED_BYTES:
        return (
            f"{_SHARED_MEMORY} has {disk.total >> 20} MiB, and data workers (num_workers > 0) and NCCL die of a bus "
            "error when it is full: start the container with --shm-size 8g or --ipc host"
        )
    num_batches = batch.num_workers * now.num_local_processes * _BATCHES_AHEAD
    needed = num_batches * batch.resolved_per_device_batch_size(now.num_processes) * _IMAGE_BYTES
    if needed <= disk.free:
        return None
    return (
        f"{_SHARED_MEMORY} has {disk.free >> 20} MiB free, and data workers hold {num_batches} batches there, "
        f"{needed >> 20} MiB for images of 224 x 224: lower --batch.num-workers or --batch-size, or start the "
        "container with a larger --shm-size"
    )


def find_few_files(now: LaunchContext) -> str | None:
    """Data workers can open enough files."""
    if importlib.util.find_spec("resource") is None:  # Windows, which has no such limit
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _MIN_FILES or soft == resource.RLIM_INFINITY:
        return None
    return f"a process may open only {soft} files, too few for data workers: run `ulimit -n {hard}` before the launch"


def find_threads(now: LaunchContext) -> str | None:
    """There is a core for every thread."""
    num_threads, num_cpus = now.config.runtime.num_threads or 1, available_cpus()
    if num_threads * now.num_local_processes <= num_cpus:
        return None
    fix = max(1, num_cpus // now.num_local_processes)
    return (
        f"{now.num_local_processes} processes of {num_threads} threads share {num_cpus} cores: set "
        f"--runtime.num-threads {fix}" + (" and launch fewer processes" if now.num_local_processes > num_cpus else "")
    )


def find_touched_cuda(now: LaunchContext) -> str | None:
    """CUDA is not used before the processes are started."""
    if not torch.cuda.is_initialized():
        return None
    return (
        "importing the recipe uses CUDA, so no process can be forked, for data or from a notebook: move that code "
        "(.cuda(), torch.cuda...) into train()"
    )


# --- software ---


def find_missing_packages(now: LaunchContext) -> str | None:
    """The packages that the dataset needs are installed."""
    dataset = getattr(now.config, "dataset", None)
    needed = {"digits": {"sklearn": "vision"}, None: {}}.get(dataset, {"datasets": "vision", "PIL": "vision"})
    missing = {name: extra for name, extra in needed.items() if importlib.util.find_spec(name) is None}
    if not missing:
        return None
    extras = ",".join(sorted(set(missing.values())))
    return f"--dataset {dataset} needs {', '.join(missing)}: pip install 'accel-trainer[{extras}]'"


def find_missing_tracker(now: LaunchContext) -> None:
    """The trackers in the config can be used."""
    check_trackers(now.config.run.track)


def find_missing_compiler(now: LaunchContext) -> str | None:
    """--compile has a compiler."""
    path = now.environ.get("PATH", "")
    names = (now.environ.get("CXX") or "g++", "clang++", "c++")
    if not now.config.runtime.compile or any(shutil.which(name, path=path) for name in names):
        return None
    return "--compile needs a C++ compiler, and there is none in PATH: install g++, or remove --compile"


def find_unsafe_load(now: LaunchContext) -> str | None:
    """torch.load cannot run code."""
    if now.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("0", ""):
        return None
    return "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set, so torch.load can run code from files: unset it"


# --- the config ---


def find_indivisible_batch(now: LaunchContext) -> None:
    """The global batch can be split evenly."""
    batch = now.config.batch
    batch.plan(batch.resolved_global_batch_size(now.num_processes), num_processes=now.num_processes)


CHECKS = (
    Check("SHARED_MEMORY", "warning", find_small_shared_memory),
    Check("OPEN_FILES", "warning", find_few_files),
    Check("THREADS", "warning", find_threads),
    Check("CUDA_TOUCHED", "error", find_touched_cuda),
    Check("PACKAGE_MISSING", "error", find_missing_packages),
    Check("TRACKER", "error", find_missing_tracker),
    Check("COMPILER_MISSING", "error", find_missing_compiler),
    Check("UNSAFE_LOAD", "warning", find_unsafe_load),
    Check("BATCH_SIZE", "error", find_indivisible_batch),
)
