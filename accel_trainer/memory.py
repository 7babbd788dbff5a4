"""Out of memory: one line that says what would fit, and with `--fit-batch` a run that goes on with that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

from .errors import OutOfMemoryError
from .plan import BatchConfig, BatchPlan
from .runtime import describe_memory
from .watchdog import Watchdog

_NEEDS_LESS = "take a smaller model or images, --mixed-precision bf16, or shard the weights (docs/fsdp.md)"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error)))


def halve_micro_batch(plan: BatchPlan, *, fact: str, may_continue: bool) -> BatchPlan:
    """Return `plan` with half the samples in a forward, in as many more forwards; `fact` says what was out of memory.

    Raises:
        OutOfMemoryError: a forward has a single sample, or the run may not continue so: what to do, in one line.
    """
    if plan.per_device_batch_size == 1:
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {_NEEDS_LESS}")
    finer = replace(plan, per_device_batch_size=math.ceil(plan.per_device_batch_size / 2))
    if not may_continue:
        flags = f"--global-batch-size {plan.global_batch_size} --accumulate {finer.accumulation_steps}"
        fix = f"start again with --fit-batch, or with {flags}, which keeps the global batch"
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {fix}")
    return finer


@contextmanager
def explain_out_of_memory(config: BatchConfig, watchdog: Watchdog, accelerator: Accelerator) -> Iterator[None]:
    """Raise an OutOfMemoryError that says what to do about one that no step was retried for."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        step, size, fix = watchdog.position.optimizer_step, config.eval_batch_size, _NEEDS_LESS
        where = "before training" if watchdog.phase == "start" else f"in the {watchdog.phase} after step {step}"
        if watchdog.phase == "evaluation" and size > 1:
            where = f"{where} with {size} per device"
            fix = f"set --batch.eval-batch-size {size // 2}, which changes no metric"
        fact = f"out of memory {where} ({describe_memory(accelerator)})"
        raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {fix}") from error
