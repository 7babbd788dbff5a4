"""Runs of several processes with shards are in `tests/distributed/test_fsdp.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_trainer.core.errors import ConfigError
from accel_trainer.training.strategy.sharded import ShardedStrategy


def make(state_dict_type: str) -> ShardedStrategy:
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=state_dict_type))
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    return ShardedStrategy(cast(Accelerator, accelerator), seed=0)


@pytest.fixture
def shard() -> Iterator[Any]:
    """A tensor that is sharded over one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distribute_tensor(torch.arange(6.0).reshape(3, 2), DeviceMesh("cpu", [0]), [Shard(0)])
    dist.destroy_process_group()


def test_shards_are_gathered_for_a_checkpoint_of_whole_tensors(shard: Any) -> None:
    gathered = make("FULL_STATE_DICT").gather({"model": {"weight": shard}, "trainer": {"step": 3}})
    weight = gathered["model"]["weight"]
    assert type(weight) is Tensor
    assert torch.equal(weight, torch.arange(6.0).reshape(3, 2))
    assert gathered["trainer"] == {"step": 3}


def test_shards_stay_shards_for_a_checkpoint_of_shards(shard: Any) -> None:
    assert (
        make("SHARDED_STATE_DICT").gather({"model": {"weight": shard}})["model"]["weight"] is shard
    )


def test_an_option_that_needs_whole_weights_is_refused_with_shards() -> None:
    strategy = make("FULL_STATE_DICT")
    strategy.refuse([])
    with pytest.raises(ConfigError, match="--compile does not work with FSDP: leave it out"):
        strategy.refuse(["--compile"])
