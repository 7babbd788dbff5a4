"""Checks of all processes together: connection, clocks and network speed. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ...core.errors import UserError
from ...distributed.accelerator import describe_machine, start_accelerator
from ...distributed.collectives import gather_numbers, join_peers, shutdown
from .findings import Finding, LaunchContext

_MAX_WAIT_S = 30.0
_LARGE_BYTES = 16 << 20
_NUM_LARGE = 5
_NUM_SMALL = 20
_SLOW_BYTES_PER_S = 100e6
_MAX_CLOCK_SKEW_S = 2.0


def examine_together(now: LaunchContext, mine: list[Finding]) -> tuple[list[str], list[Finding]]:
    """Return lines about the machine and its network, and the findings of all processes.

    There are no lines if the processes cannot connect.

    **Collective.**
    """
    timeout_s = min(now.config.runtime.timeout_s, _MAX_WAIT_S)
    try:
        accelerator = start_accelerator(replace(now.config.runtime, timeout_s=timeout_s))
    except UserError as error:
        return [], [*mine, Finding(error.code, "error", error.message, now.rank)]
    lines = [describe_machine(accelerator)]
    if accelerator.num_processes > 1:
        line, bytes_per_s = _measure(accelerator)
        lines.append(line)
        found = [*_find_clock_skew(accelerator), *_find_slow(bytes_per_s)]
        if accelerator.is_main_process:
            mine = [*mine, *found]
        peers = join_peers(accelerator, timeout_s=timeout_s)
        by_process = peers.agree(lambda: [asdict(finding) for finding in mine])
        mine = [Finding(**values) for findings in by_process for values in findings]
    shutdown(accelerator)
    return lines, mine


def _find_clock_skew(accelerator: Accelerator) -> list[Finding]:
    """Compare the clocks, which decide which error of a failed run came first. **Collective.**"""
    dist.barrier()
    clocks = gather_numbers(round(1e9 * time.time()), accelerator)
    skew_s = (max(clocks) - min(clocks)) / 1e9
    if skew_s <= _MAX_CLOCK_SKEW_S:
        return []
    message = (
        f"the clocks of the machines differ by {skew_s:.1f} s, so the wrong error may be reported "
        "as the first: synchronise them with NTP"
    )
    return [Finding("CLOCKS", "warning", message)]


def _find_slow(bytes_per_s: float) -> list[Finding]:
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return []
    message = (
        f"gradients are exchanged at {bytes_per_s / 1e6:.0f} MB/s, which takes "
        f"{45e6 / bytes_per_s:.1f} s per step for a ResNet-18: choose the fast network "
        "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or raise --accumulate"
    )
    return [Finding("SLOW_NETWORK", "warning", message)]


def _measure(accelerator: Accelerator) -> tuple[str, float]:
    """Time an all_reduce of one number and of many; return a line of text, and bytes per second.

    **Collective. Host sync.**
    """
    device = accelerator.device
    small = torch.ones(1, device=device)
    large = torch.ones(_LARGE_BYTES // 4, device=device)
    latency_s = _seconds(lambda: dist.all_reduce(small), small, times=_NUM_SMALL)
    bytes_per_s = _LARGE_BYTES / _seconds(lambda: dist.all_reduce(large), large, times=_NUM_LARGE)
    line = (
        f"all_reduce over {accelerator.num_processes} processes: {bytes_per_s / 1e9:.3g} GB/s "
        f"({_LARGE_BYTES >> 20} MiB), {latency_s * 1e3:.3g} ms for one number"
    )
    return line, bytes_per_s


def _seconds(act: Callable[[], object], tensor: torch.Tensor, *, times: int) -> float:
    """Return the mean time of a call, after a warm-up call."""
    act()
    tensor[0].item()
    start_s = time.perf_counter()
    for _ in range(times):
        act()
    tensor[0].item()
    return (time.perf_counter() - start_s) / times
