"""Sharded weights (FSDP2): whole tensors for a checkpoint, and back to shards.

A checkpoint holds whole tensors, gathered to the main process one by one: its files are the same for any number of
processes, sharded or not. The main machine needs host memory for one copy of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from ..core.errors import ConfigError


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the prepared model's weights are shards."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def reject_options_with_fsdp(accelerator: Accelerator, options: Mapping[str, object]) -> None:
    """Raise ConfigError for the first of `options`, by flag, that is on and needs whole weights."""
    for flag, value in options.items() if is_sharded(accelerator) else ():
        if value:
            raise ConfigError("FSDP", f"{flag} does not work with FSDP: leave it out, or launch with multi_gpu.yaml")


def gather_shards(state: Any) -> Any:
    """Return `state` with whole tensors on the main process's host in place of shards. **Collective** with shards.

    On the other processes shards stay: they have the shapes and dtypes of the whole.
    """
    if isinstance(state, Mapping):
        return {key: gather_shards(value) for key, value in state.items()}
    if not hasattr(state, "full_tensor"):  # importing DTensor takes 0.5 s
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state


def shard_like(mine: Tensor, whole: Tensor) -> Tensor:
    """Return this process's shard of `whole`, placed as `mine`; `whole` itself if `mine` is not a shard."""
    if not hasattr(mine, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = mine.device_mesh, mine.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(mine.device), mesh, placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
