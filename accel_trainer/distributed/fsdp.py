"""Sharded weights (FSDP2): whole tensors for a checkpoint, and back to shards.

With FULL_STATE_DICT a checkpoint holds whole tensors, gathered to the main process one by one: its files are the same
for any number of processes, sharded or not, and the main machine needs host memory for one copy of the state. With
SHARDED_STATE_DICT each process writes its shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, convert_outputs_to_fp32, fsdp2_prepare_model
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.tensor_memory import copy_model

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the prepared model's weights are shards."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether each process writes its shards to a checkpoint: `fsdp_state_dict_type` is SHARDED_STATE_DICT."""
    return is_sharded(accelerator) and accelerator.state.fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def sharded_copy(model: nn.Module, accelerator: Accelerator) -> nn.Module | None:
    """Return a copy of a placed `model`, sharded as `prepare` will shard the model; None if it does not."""
    if not is_sharded(accelerator):
        return None
    copied = copy_model(model)
    if accelerator.native_amp:  # `place_model` has set the `forward` of the original
        del copied.forward
        copied.forward = convert_outputs_to_fp32(accelerator.autocast()(copied.forward))
    return fsdp2_prepare_model(accelerator, copied)  # type: ignore[no-any-return]  # accelerate is untyped


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
    if not is_shard(state):
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a part of a whole."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes 0.5 s


def place_in_whole(shard: DTensor) -> tuple[list[int], list[int]]:
    """Return where this process's shard begins in the whole, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return list(offsets), list(shape)


def as_shard(mine: DTensor, local: Tensor) -> Tensor:
    """Return `local`, this process's part of a whole, as a shard placed as `mine`."""
    from torch.distributed.tensor import DTensor

    mesh, placements, local = mine.device_mesh, mine.placements, local.to(mine.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=mine.shape, stride=mine.stride())


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
