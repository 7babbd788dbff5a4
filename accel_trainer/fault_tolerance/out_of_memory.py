"""Out of memory: a one-line error that says what would fit, or with `--fit-batch` a run that continues with it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import should_reduce_batch_size

from ..core.batch_plan import BatchConfig, BatchPlan
from ..core.errors import OutOfMemoryError, Preempted
from ..distributed.accelerator import peak_memory_bytes
from .watchdog import Watchdog

_logger = logging.getLogger(__name__)

_FRAGMENTED_FRACTION = 0.2  # of what torch reserved on a GPU and could not use
_NEEDS_LESS = "use a smaller model or images, --mixed-precision bf16, or shard the weights (docs/fsdp.md)"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error)))


def _peak(accelerator: Accelerator) -> str:
    device = torch.get_device_module(accelerator.device)
    reserved_bytes = device.max_memory_reserved(accelerator.device) if accelerator.device.type == "cuda" else 0
    return describe_peak(peak_memory_bytes(accelerator), reserved_bytes)


def describe_peak(used_bytes: int, reserved_bytes: int) -> str:
    """Return the most memory that was used, and what to do where much more was reserved on a GPU."""
    used = f"peak {used_bytes / 2**30:.2f} GiB"
    if used_bytes >= (1 - _FRAGMENTED_FRACTION) * reserved_bytes:
        return used
    fix = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return f"{used} of {reserved_bytes / 2**30:.2f} GiB reserved, the rest in fragments: {fix}"


def needs_restart(accelerator: Accelerator) -> bool:
    """Return whether a step that was out of memory takes a restart: other processes wait in its collective."""
    return bool(accelerator.distributed_type != DistributedType.NO)


def halve_micro_batch(
    plan: BatchPlan, *, accelerator: Accelerator, step: int, remember: Callable[[int], None] | None
) -> BatchPlan:
    """Return `plan` with half the samples in a forward, and more forwards.

    A single process retries the step with it. Of several, the one that is out of memory never reaches the collective
    in which the others wait: they end, and the same command, started again, continues with the size that `remember`
    got (None: the user has not asked for it).

    Raises:
        OutOfMemoryError: a forward has a single sample, or the user has not asked for it.
        Preempted: it takes a restart.
    """
    size = plan.per_device_batch_size
    fact = f"out of memory at step {step} with {size} per device ({_peak(accelerator)})"
    if size == 1:
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {_NEEDS_LESS}")
    if plan.reduce == "exact":
        fix = "with --reduce exact another --batch-size changes the result: start a new run with half of it"
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {fix}")
    finer = replace(plan, per_device_batch_size=math.ceil(size / 2))
    if remember is None:
        flags = f"--global-batch-size {plan.global_batch_size} --accumulate {finer.accumulation_steps}"
        fix = f"start again with --fit-batch, or with {flags}, which keeps the global batch"
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {fix}")
    split = f"{finer.per_device_batch_size} x {finer.accumulation_steps}"
    if needs_restart(accelerator):
        remember(finer.per_device_batch_size)
        raise Preempted("OUT_OF_MEMORY", f"{fact}: the same command, started again, continues with {split}")
    _logger.warning("%s: continuing with %s", fact, split)
    return finer


@contextmanager
def explain_out_of_memory(config: BatchConfig, watchdog: Watchdog, accelerator: Accelerator) -> Iterator[None]:
    """Turn an out-of-memory error that no retry handled into an OutOfMemoryError that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        step, size = watchdog.position.optimizer_step, config.eval_batch_size
        fix = f"set --batch.eval-batch-size below {size}" if watchdog.phase == "evaluation" else _NEEDS_LESS
        fact = f"out of memory after step {step}, phase {watchdog.phase} ({_peak(accelerator)})"
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {fix}") from error
