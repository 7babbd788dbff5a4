"""How the processes train one model: each has a shard of it (`sharded`), or all of it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ...core.batch_plan import BatchPlan
from ...core.types import Task
from ..step.turns import takes_turns
from .base import Strategy
from .data_parallel import DataParallelStrategy


def choose_strategy(
    plan: BatchPlan, accelerator: Accelerator, task: Task, *, seed: int
) -> Strategy:
    """Return the strategy that the launcher, `plan` and the task ask for, in this order.

    The modules of all but the usual strategy are imported only if they are chosen.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        from .sharded import ShardedStrategy

        return ShardedStrategy(accelerator, seed=seed)
    if plan.reduce == "exact":
        from .exact import ExactStrategy

        return ExactStrategy(accelerator, seed=seed, num_micro_batches=plan.num_parts)
    if takes_turns(task) and accelerator.num_processes > 1:
        from .in_turn import TurnStrategy

        return TurnStrategy(accelerator, seed=seed)
    return DataParallelStrategy(accelerator, seed=seed)
