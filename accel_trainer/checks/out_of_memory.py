"""Turns an out-of-memory error into one line that says what would fit."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

from ..core.batch_plan import BatchConfig
from ..core.errors import OutOfMemoryError
from ..distributed.machine import peak_memory_bytes
from ..fault_tolerance.activity import Activity

# Memory counts as fragmented if torch could not use this fraction of what it reserved on a GPU.
_FRAGMENTED_FRACTION = 0.2
_NEEDS_LESS = (
    "use a smaller model or images, --mixed-precision bf16, or shard the weights (docs/fsdp.md)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error)))


def describe_peak(used_bytes: int, reserved_bytes: int) -> str:
    """Return the most memory that was used, and what to do if much more was reserved on a GPU."""
    used = f"peak {used_bytes / 2**30:.2f} GiB"
    if used_bytes >= (1 - _FRAGMENTED_FRACTION) * reserved_bytes:
        return used
    fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
    return f"{used} of {reserved_bytes / 2**30:.2f} GiB reserved, the rest in fragments: {fix}"


def explain_out_of_memory(
    config: BatchConfig, activity: Activity, accelerator: Accelerator
) -> OutOfMemoryError:
    """Return the error of a process that has no memory left: it says what to do."""
    where = f"after step {activity.state.optimizer_step}, phase {activity.phase}"
    fix = _NEEDS_LESS
    if activity.phase == "evaluation":
        fix = f"set --batch.eval-batch-size below {config.eval_batch_size}"
    elif activity.couples_batch:
        fix = f"{_NEEDS_LESS}; a smaller batch has fewer pairs and trains a different model"
    elif activity.phase == "training":
        fix = _smaller_forwards(config, accelerator.num_processes)
    device = accelerator.device
    reserved_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    peak = describe_peak(peak_memory_bytes(accelerator), reserved_bytes)
    return OutOfMemoryError("OUT_OF_MEMORY", f"out of memory {where} ({peak}): {fix}")


def _smaller_forwards(config: BatchConfig, num_processes: int) -> str:
    """Return how to train with the same global batch in forwards of half the size."""
    size = config.resolved_per_device_batch_size(num_processes)
    if size == 1:
        return _NEEDS_LESS
    if config.reduce == "exact":
        return (
            "with --reduce exact, a different --batch-size changes the result: "
            "start a new run with half of it"
        )
    global_batch_size = config.resolved_global_batch_size(num_processes)
    num_micro_batches = math.ceil(global_batch_size / num_processes / math.ceil(size / 2))
    flags = f"--global-batch-size {global_batch_size} --accumulate {num_micro_batches}"
    return f"start again with {flags}, which trains the same in forwards of half the size"
