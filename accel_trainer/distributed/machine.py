"""The cores and memory available to this process, on Linux, macOS and Windows."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cpus() -> int:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota
        quota, period = _CPU_QUOTA.read_text(encoding="utf-8").split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def peak_memory_bytes(accelerator: Accelerator) -> int:
    """Return this process's peak memory: the device's if it keeps count, else resident memory."""
    device = torch.get_device_module(accelerator.device)
    if hasattr(device, "max_memory_allocated"):
        return int(device.max_memory_allocated(accelerator.device))
    try:
        import resource
    except ImportError:  # Windows
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> None:
    """Return to the system the freed memory that glibc keeps for the next step."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def free_memory_bytes() -> int:
    """Return the free memory of the machine, or the container's limit if that is less."""
    free = int(psutil.virtual_memory().available)
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no limit
            free = min(free, int(path.read_text(encoding="utf-8")))
    return free
