"""Explains the errors of a failed run: known messages of torch, NCCL and the system, with the fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.serialization import read_json_object
from ...core.filesystem import open_file
from .findings import Finding

_MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Symptom:
    """`pattern` matches the error text; `meaning` is the cause and the fix."""

    code: str
    pattern: str
    meaning: str


SYMPTOMS = (
    Symptom(
        "UNUSED_PARAMETERS",
        r"Expected to have finished reduction in the prior iteration",
        "a parameter did not contribute to the loss: freeze it (requires_grad=False), remove it, or set "
        "--runtime.find-unused-parameters; TORCH_DISTRIBUTED_DEBUG=INFO names it",
    ),
    Symptom(
        "OUT_OF_MEMORY",
        r"out of memory|Cannot allocate memory|can't allocate memory|DefaultCPUAllocator",
        "the batch is too large: run again with --fit-batch, or with twice --accumulate and the same "
        "--global-batch-size; in an evaluation, lower --batch.eval-batch-size",
    ),
    Symptom(
        "ONE_SAMPLE",
        r"Expected more than 1 value per channel when training",
        "a BatchNorm got a single value per channel, usually in a last step of one sample: drop it with "
        "--batch.drop-last, or set another --batch-size",
    ),
    Symptom(
        "PORT_IN_USE",
        r"EADDRINUSE|[Aa]ddress already in use",
        "another job has the port: launch with --main_process_port 0 on one machine, or another port on several",
    ),
    Symptom(
        "NCCL_ERROR",
        r"NCCL error|nccl\w*(SystemError|InternalError|UnhandledCudaError|RemoteError)",
        "the GPUs cannot communicate: run again with NCCL_DEBUG=INFO, which names the failing call; usual causes are a "
        "small /dev/shm, the wrong NCCL_SOCKET_IFNAME, a firewall, or different driver versions",
    ),
    Symptom(
        "SHARED_MEMORY",
        r"[Bb]us error|insufficient shared memory|No space left on device.*shm|shm.*No space left on device",
        "/dev/shm is full: start the container with --shm-size 8g or --ipc host, or use num_workers 0",
    ),
    Symptom(
        "DISK_SPACE",
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space and run the same command again",
    ),
    Symptom(
        "OPEN_FILES",
        r"Too many open files",
        "data workers need more open files: run `ulimit -n 65536` before the launch",
    ),
    Symptom(
        "CUDA_TOUCHED",
        r"Cannot re-initialize CUDA in forked subprocess",
        "something used CUDA before the processes were forked: move it into train(), or restart the notebook's kernel",
    ),
    Symptom(
        "STUCK",
        r"stuck, no progress",
        "a process made no progress; logs/ has its stack traces. Usual causes are a data set that blocks, a collective "
        "that only some processes call, or a time limit that is too short (--runtime.timeout-s)",
    ),
    Symptom(
        "KILLED",
        r"gone without a word",
        "a process was killed from outside, usually for lack of memory (`dmesg | grep -i oom`): fewer data workers, "
        "or a smaller batch",
    ),
)


def diagnose(run: Path) -> list[Finding]:
    """Return the explanation of the error that ended the run, if it is a known one."""
    try:
        status = read_json_object(run / "status.json")
    except (OSError, ValueError):
        return []
    error = status.get("error")
    if status.get("state") != "failed" or not error or not isinstance(error, str):
        return []
    logs = [] if (run / "logs").is_symlink() else sorted((run / "logs").glob("rank-*.log"))
    said = "\n".join([error, *map(_tail, logs)])
    first_line = error.splitlines()[0]
    return [
        Finding(symptom.code, "warning", f"the last attempt ended with: {first_line[:160]}; {symptom.meaning}")
        for symptom in SYMPTOMS
        if re.search(symptom.pattern, said)
    ][:1]


def _tail(log: Path) -> str:
    try:
        with open_file(log) as file:
            file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
            return file.read(_MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
