"""Tensors that may be shards of a whole (torch's DTensor)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a part of a whole."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes 0.5 s


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def place_in_whole(shard: DTensor) -> tuple[list[int], list[int]]:
    """Return where this process's shard begins in the whole, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        shard.shape, shard.device_mesh, shard.placements
    )
    return list(offsets), list(shape)


def as_shard(mine: DTensor, local: Tensor) -> Tensor:
    """Return `local`, this process's part of a whole, as a shard placed as `mine`."""
    from torch.distributed.tensor import DTensor

    mesh, placements, local = mine.device_mesh, mine.placements, local.to(mine.device)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=mine.shape, stride=mine.stride()
    )
