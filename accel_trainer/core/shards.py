"""Tensors that may be shards of a whole tensor (torch's DTensor)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: object) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor."""
    return hasattr(tensor, "full_tensor")  # Importing DTensor takes 0.5 s.


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`, or `tensor` itself if it is not a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def place_in_whole(shard: DTensor) -> tuple[list[int], list[int]]:
    """Return the offsets of this process's shard in the whole tensor, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        shard.shape, shard.device_mesh, shard.placements
    )
    return list(offsets), list(shape)


def as_shard(template: DTensor, local: Tensor) -> Tensor:
    """Return a DTensor with the placement of `template` and `local` as this process's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )
