"""Cores and memory that the operating system gives to this process, on Linux, macOS and Windows."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """Return the cores that this process may use, by its affinity and by its container's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, *_cpu_quotas())))


def _cpu_quotas() -> Iterator[float]:
    """Yield the quota, in cores, of each cgroup (version 2) around this process."""
    yield math.inf
    lines = _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.is_file() else []
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        # In a container its own cgroup is often at the root, while the path is that of the host.
        inner = _CGROUPS / path
        for folder in (inner, *inner.parents[: len(inner.parts) - len(_CGROUPS.parts)]):
            with suppress(OSError, ValueError):  # no quota there
                quota, period = (folder / "cpu.max").read_text().split()
                yield int(quota) / int(period)


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had resident."""
    try:
        import resource
    except ImportError:  # Windows
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes() -> int:
    """Return the memory that is free for this process, on the machine and within its container's limit."""
    free = int(psutil.virtual_memory().available)
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no limit
            free = min(free, int(path.read_text()))
    return free
