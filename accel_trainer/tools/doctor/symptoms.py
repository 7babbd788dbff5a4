"""What the last words of a run that failed mean: errors of torch, NCCL and the system, with what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...storage import open_file
from ...strict_json import read_json_object
from .findings import Finding

_MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Symptom:
    """`pattern` is how it is written in an error; `meaning` says why, and the way out."""

    code: str
    pattern: str
    meaning: str


SYMPTOMS = (
    Symptom(
        "UNUSED_PARAMETERS",
        r"Expected to have finished reduction in the prior iteration",
        "a parameter took no part in the loss: freeze it (requires_grad=False), take it out of the model, or set "
        "--runtime.find-unused-parameters; TORCH_DISTRIBUTED_DEBUG=INFO names it",
    ),
    Symptom(
        "OUT_OF_MEMORY",
        r"out of memory|Cannot allocate memory|can't allocate memory|DefaultCPUAllocator",
        "the batch does not fit: start again with --fit-batch, or with twice --accumulate and the same "
        "--global-batch-size; an evaluation has --batch.eval-batch-size",
    ),
    Symptom(
        "ONE_SAMPLE",
        r"Expected more than 1 value per channel when training",
        "a BatchNorm got a single value per channel, mostly in a last step of one sample: leave that out with "
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
        "the GPUs cannot speak to each other: start again with NCCL_DEBUG=INFO, which names the call; mostly a tiny "
        "/dev/shm, the wrong NCCL_SOCKET_IFNAME, a firewall, or other driver versions on some machines",
    ),
    Symptom(
        "SHARED_MEMORY",
        r"[Bb]us error|insufficient shared memory|No space left on device.*shm|shm.*No space left on device",
        "/dev/shm is full: start the container with --shm-size 8g or --ipc host, or use num_workers 0",
    ),
    Symptom(
        "DISK_SPACE",
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space and start the same command again",
    ),
    Symptom(
        "OPEN_FILES",
        r"Too many open files",
        "data workers need more open files: `ulimit -n 65536` before the launch",
    ),
    Symptom(
        "CUDA_TOUCHED",
        r"Cannot re-initialize CUDA in forked subprocess",
        "something used CUDA before the processes were forked: move it into train(), or restart the notebook's kernel",
    ),
    Symptom(
        "STUCK",
        r"stuck, no progress",
        "a process waited for something in vain; logs/ has what each one did: a data set that blocks, a collective "
        "that only some processes call, or a time limit that is too short (--runtime.timeout-s)",
    ),
    Symptom(
        "KILLED",
        r"gone without a word",
        "a process was killed from outside, mostly for lack of memory (`dmesg | grep -i oom`): fewer data workers, "
        "or a smaller batch",
    ),
)


def diagnose(run: Path) -> list[Finding]:
    """Return what is known about the error that ended the run in a folder, if one did."""
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
