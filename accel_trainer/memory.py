"""Out of memory: one line that says what would fit, and with `--fit-batch` a run that goes on with that."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, release_memory
from accelerate.utils.memory import should_reduce_batch_size

from .errors import OutOfMemoryError, Preempted
from .plan import BatchConfig, BatchPlan
from .runtime import describe_memory
from .update import WeightUpdate
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .trainer import Trainer

_logger = logging.getLogger(__name__)

_NEEDS_LESS = "take a smaller model or images, --mixed-precision bf16, or shard the weights (docs/fsdp.md)"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error)))


class BatchFit:
    """What is done about a step or an evaluation that needs more memory than there is.

    A process of its own can take the step anew. Of several, the one that is out of memory never comes
    to the collective in which the others wait: they end, and the same command goes on with less.
    `remember` notes the samples of a forward for the next start.
    """

    def __init__(
        self,
        batch: BatchConfig,
        *,
        accelerator: Accelerator,
        remember: Callable[[int], None] = lambda per_device_batch_size: None,
    ) -> None:
        self._batch, self._accelerator, self._remember = batch, accelerator, remember
        self._is_alone = accelerator.distributed_type == DistributedType.NO

    @contextmanager
    def retrying(self, trainer: Trainer, update: WeightUpdate) -> Iterator[None]:
        """Let the block end if a step of it is out of memory: the next windows begin with that step, in finer parts.

        Raises:
            OutOfMemoryError: that is not wanted, or cannot be.
            Preempted: it takes another start.
        """
        if self._batch.fit_batch and not self._is_alone and trainer.state.optimizer_step == 0:
            trainer.save()  # or there would be nothing to start from again
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not (update.is_open and is_out_of_memory(error)):
                raise
            finer = self._halved(trainer.loader.plan, step=trainer.state.optimizer_step + 1)
            clear_frames(error.__traceback__)  # they hold what the forwards left
            update.undo()
            release_memory()
            trainer.save()  # where the parts change, so that a run killed from here on has the same bits
            trainer.checkpointer.wait(must_succeed=True)
            self._remember(finer.per_device_batch_size)
            trainer.loader.plan = finer

    def _halved(self, plan: BatchPlan, *, step: int) -> BatchPlan:
        size = plan.per_device_batch_size
        fact = f"out of memory at step {step} with {size} per device ({describe_memory(self._accelerator)})"
        if size == 1:
            raise OutOfMemoryError("OUT_OF_MEMORY", f"{fact}: {_NEEDS_LESS}")
        finer = replace(plan, per_device_batch_size=math.ceil(size / 2))
        if not self._batch.fit_batch:
            flags = f"--global-batch-size {plan.global_batch_size} --accumulate {finer.accumulation_steps}"
            raise OutOfMemoryError(
                "OUT_OF_MEMORY",
                f"{fact}: start again with --fit-batch, or with {flags}, which keeps the global batch",
            )
        split = f"{finer.per_device_batch_size} x {finer.accumulation_steps}"
        if not self._is_alone:
            self._remember(finer.per_device_batch_size)
            raise Preempted("OUT_OF_MEMORY", f"{fact}: the same command, started again, goes on with {split}")
        _logger.warning("%s: going on with %s", fact, split)
        return finer


@contextmanager
def shortage_explained(config: BatchConfig, watchdog: Watchdog, accelerator: Accelerator) -> Iterator[None]:
    """Raise an OutOfMemoryError that says what to do about one that no step of `BatchFit` met."""
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
