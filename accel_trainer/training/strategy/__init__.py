"""How the processes train one model: each with all of it (`plain`, `exact`), or with shards."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ...core.batch_plan import BatchPlan
from ...core.errors import ConfigError
from .base import Strategy
from .plain import PlainStrategy


def choose_strategy(plan: BatchPlan, accelerator: Accelerator, *, seed: int) -> Strategy:
    """Return the strategy that the launcher and `plan` ask for.

    The modules of the exact and of the sharded strategy are imported only if they are chosen.

    Raises:
        ConfigError: the launcher and `plan` contradict each other.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        if plan.reduce == "exact":
            raise ConfigError(
                "REDUCE", "--reduce exact does not work with FSDP: remove one of them"
            )
        from .sharded import ShardedStrategy

        return ShardedStrategy(accelerator, seed=seed)
    if plan.reduce == "exact":
        from .exact import ExactStrategy

        return ExactStrategy(accelerator, seed=seed, num_micro_batches=plan.num_parts)
    return PlainStrategy(accelerator, seed=seed)
