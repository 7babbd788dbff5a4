"""Weights that lie in shards on all processes (FSDP2): whole for a checkpoint, and back.

A checkpoint holds whole tensors, gathered one after the other to the main process, not shards: so it
is the same file, with the same hashes and the same commit, whatever number of processes wrote it or
reads it, sharded or not, and its weights are those to export. What it costs is host memory for one copy
of the state on the main machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from .errors import ConfigError


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the prepared model's weights are shards."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def refuse_if_sharded(accelerator: Accelerator, options: Mapping[str, object]) -> None:
    """Raise a ConfigError for the first of `options`, by flag, that is on and would need whole weights."""
    for flag, value in options.items() if is_sharded(accelerator) else ():
        if value:
            raise ConfigError(
                "FSDP",
                f"{flag} does not work on sharded weights: leave it out, or launch with multi_gpu.yaml",
            )


def gather_shards(state: Any) -> Any:
    """Return `state` with whole tensors for shards, on the main process's host. **Collective** if there are any.

    On the other processes shards stay as they are, which show the shapes and dtypes of the whole.
    """
    if isinstance(state, Mapping):
        return {key: gather_shards(value) for key, value in state.items()}
    if not hasattr(state, "full_tensor"):  # to import DTensor would take 0.5 s of every start
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state


def shard_like(mine: Tensor, whole: Tensor) -> Tensor:
    """Return this process's shard of `whole`, cut and placed as `mine`; or `whole` if that is no shard."""
    if not hasattr(mine, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = mine.device_mesh, mine.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(mine.device), mesh, placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """Return what of `tensor` lies on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
