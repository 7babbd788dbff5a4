from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_trainer.core.shards import as_shard, is_shard, local_part, place_in_whole


@pytest.fixture
def second_of_two() -> Iterator[DeviceMesh]:
    """The mesh as the second of two processes sees it; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


def test_a_whole_tensor_is_no_shard_and_its_own_local_part() -> None:
    whole = torch.ones(3)
    assert not is_shard(whole)
    assert local_part(whole) is whole


def test_a_shard_knows_its_place_in_the_whole(second_of_two: DeviceMesh) -> None:
    local = torch.arange(4.0).reshape(2, 2)
    shard = DTensor.from_local(
        local, second_of_two, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1)
    )
    assert is_shard(shard)
    assert torch.equal(local_part(shard), local)
    assert place_in_whole(shard) == ([3, 0], [2, 2])


def test_a_local_part_becomes_a_shard_placed_as_another(second_of_two: DeviceMesh) -> None:
    zeros = torch.zeros(2, 2)
    mine = DTensor.from_local(
        zeros, second_of_two, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1)
    )
    shard = as_shard(mine, torch.ones(2, 2))
    assert (shard.shape, shard.placements, shard.device_mesh) == (
        mine.shape,
        mine.placements,
        mine.device_mesh,
    )
    assert place_in_whole(shard) == place_in_whole(mine)
    assert torch.equal(local_part(shard), torch.ones(2, 2))
