"""How the processes of a run train one model: each with the whole (`plain`), in a fixed order (`exact`), in shards."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ...core.batch_plan import BatchPlan
from ...core.errors import ConfigError
from .plain import PlainStrategy


def choose_strategy(plan: BatchPlan, accelerator: Accelerator, *, seed: int) -> PlainStrategy:
    """Return the strategy that the launcher and `plan` ask for; the modules of the others are not imported.

    Raises:
        ConfigError: they contradict each other.
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

        return ExactStrategy(accelerator, seed=seed, num_parts=plan.num_parts)
    return PlainStrategy(accelerator, seed=seed)
