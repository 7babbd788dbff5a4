"""Several processes: a group of NCCL, a process that is killed, and one that keeps the others
waiting for too long.

NCCL takes one process per GPU; with a single GPU the processes share it, over gloo.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from .. import results
from .page import Page, Setting
from .runs import SMALL, command, newest_step

# A group of one process, as a run on several GPUs forms it; what warns goes to stderr.
JOINED = """
import os, time, warnings
warnings.simplefilter("always")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch, torch.distributed as dist
from accel_trainer.distributed.process_group import init_process_group
torch.cuda.set_device(0)
init_process_group("cpu:gloo,cuda:nccl", timeout_s=20, device=torch.device("cuda", 0))
dist.all_reduce(torch.ones(2, device="cuda"))
dist.all_reduce(torch.ones(2))
dist.barrier(async_op=True).wait()
dist.destroy_process_group()
print("joined")
"""
# The main process works for longer than the others wait.
LATE = """
import sys, time
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from accel_trainer.distributed.collectives import run_on_main
timeout_s = float(sys.argv[1])
accelerator = start_accelerator(RuntimeConfig(timeout_s=timeout_s, backend=sys.argv[2] or None))
run_on_main(lambda: time.sleep(2.5 * timeout_s), accelerator)
"""
MAX_S, TIMEOUT_S = 60, 4


def run(page: Page, setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checks = {
            "a process is killed": partial(_kill, page, setting, Path(folder)),
            "work of the main process is too long": partial(_wait, page, setting),
        }
        if setting.device == "cuda":
            checks["a group of NCCL"] = partial(_join, page)
        page.attempt_together(checks)


def _join(page: Page) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOINED], cwd=results.ROOT, capture_output=True, text=True
    )
    warned = [line[:200] for line in done.stderr.splitlines() if "Warning" in line or "[W" in line]
    for line in warned or ["none"]:
        page.add(
            "A group of NCCL with one process", {"warning": line, "exit code": done.returncode}
        )
    holds = done.returncode == 0 and not warned and "joined" in done.stdout
    page.judge("a group of NCCL is formed and left without a warning", holds=holds)


def _kill(page: Page, setting: Setting, folder: Path) -> None:
    """Kill one of two processes, which the other then meets in a collective: it must end, without a
    launcher's help."""
    flags = (
        *SMALL,
        "--max-steps",
        "100000",
        "--checkpoint-every-n-steps",
        "5",
        "--runtime.timeout-s",
        "20",
    )
    share = ("--runtime.backend", backend) if (backend := _backend()) else ()
    main, other = _start_two(command(setting, folder / "run", *flags, *share), setting)
    while main.poll() is None and newest_step(folder / "run") < 5:
        time.sleep(0.05)
    if main.poll() is not None:
        other.kill()
        raise RuntimeError(f"the run ended before the kill: {main.communicate()[0][-600:]}")
    other.kill()
    _judge_end(page, "one of two processes is killed", main, since_s=time.monotonic())
    other.communicate()


def _wait(page: Page, setting: Setting) -> None:
    main, other = _start_two([sys.executable, "-c", LATE, str(TIMEOUT_S), _backend()], setting)
    what = f"the main process works for 2.5 times the timeout of {TIMEOUT_S} s"
    _judge_end(page, what, other, since_s=time.monotonic())
    main.kill()
    main.communicate()


def _backend() -> str:
    """Return what the processes have to ask for: nothing if each has a GPU or none has."""
    return "gloo" if torch.cuda.device_count() == 1 else ""


def _start_two(
    words: Sequence[str], setting: Setting
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if _backend():  # accelerate would give DDP the local rank as the number of the GPU they share
        shared["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    if setting.device == "cpu":
        shared["ACCELERATE_USE_CPU"] = "true"
    started = [
        subprocess.Popen(
            words,
            cwd=results.ROOT,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    return started[0], started[1]


def _judge_end(page: Page, what: str, process: subprocess.Popen[str], *, since_s: float) -> None:
    """Wait for the end of a process that lacks the other one."""
    try:
        said, _ = process.communicate(timeout=2 * MAX_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
    elapsed_s = time.monotonic() - since_s
    lines = [line for line in said.splitlines() if "error[" in line or "timed out" in line.lower()]
    shown = (lines or said.splitlines() or [""])[-1][:200]
    row = {
        "what": what,
        "backend": _backend() or ("nccl" if torch.cuda.is_available() else "gloo"),
        "the other ended after s": elapsed_s,
        "exit code": process.returncode,
        "said": shown,
    }
    page.add("Two processes, without a launcher", row)
    holds = elapsed_s <= MAX_S and process.returncode != 0 and bool(lines)
    page.judge(
        f"{what}: the other ends within {MAX_S} s and says why ({elapsed_s:.0f} s)", holds=holds
    )
