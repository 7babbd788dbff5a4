"""How the processes train one model: each has all of it (`data_parallel`, `exact`) or a shard."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ...core.batch_plan import BatchPlan
from .base import Strategy
from .data_parallel import DataParallelStrategy


def choose_strategy(plan: BatchPlan, accelerator: Accelerator, *, seed: int) -> Strategy:
    """Return the strategy that the launcher and `plan` ask for; the launcher comes first.

    The modules of the exact and of the sharded strategy are imported only if they are chosen.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        from .sharded import ShardedStrategy

        return ShardedStrategy(accelerator, seed=seed)
    if plan.reduce == "exact":
        from .exact import ExactStrategy

        return ExactStrategy(accelerator, seed=seed, num_micro_batches=plan.num_parts)
    return DataParallelStrategy(accelerator, seed=seed)
