"""What the operating system says of this machine and this process, on Linux, macOS and Windows."""

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
    """Return the cores that this process may use, by its affinity and by the CPU quota of its container; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, *_cpu_quotas())))


def _cpu_quotas() -> Iterator[float]:
    """Yield how many cores' time each cgroup around this process allows."""
    yield math.inf
    lines = _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            continue
        # A container often sees its own cgroup at the root, and the path of the host.
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.parts) - len(root.parts)]):
            with suppress(OSError, ValueError):  # none is set there
                yield _version_1_quota(folder) if controllers else _version_2_quota(folder)


def _version_2_quota(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _version_1_quota(folder: Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else math.inf


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
    """Return the memory that this process can still take before others or the kernel stop it."""
    free = int(psutil.virtual_memory().available)
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            free = min(free, int(path.read_text()))
    return free


def total_memory_bytes() -> int:
    """Return the memory of the machine."""
    return int(psutil.virtual_memory().total)
