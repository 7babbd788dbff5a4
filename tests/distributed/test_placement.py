from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_trainer.core.errors import ConfigError
from accel_trainer.distributed.accelerator import RuntimeConfig
from accel_trainer.distributed.placement import place_model

from ..workload import SmallNet


def placed(model: nn.Module, *, channels_last: bool = True) -> nn.Module:
    return place_model(model, Accelerator(cpu=True), RuntimeConfig(channels_last=channels_last))


@pytest.mark.parametrize("channels_last", [True, False])
def test_filters_of_a_placed_model_are_laid_out_as_configured(channels_last: bool) -> None:
    filters = placed(SmallNet(norm="batch"), channels_last=channels_last).layers[3].weight
    assert filters.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_a_placed_model_keeps_its_parameters_and_ties_by_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, bias=False), nn.Conv2d(3, 3, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    before = list(model.parameters())
    assert all(now is then for now, then in zip(placed(model).parameters(), before, strict=True))
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_a_placed_model_has_no_parameter_that_is_a_slice_of_a_tensor() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    model = nn.ParameterDict({"slice": nn.Parameter(whole[:3, 1:5])})
    assert placed(model)["slice"].is_contiguous()
    assert torch.equal(model["slice"], whole[:3, 1:5])


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet: call the model with"):
        placed(nn.Sequential(nn.LazyLinear(3)))


def test_a_buffer_without_a_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.running_mean has no shape yet"):
        placed(nn.Sequential(nn.LazyBatchNorm1d(affine=False)))


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        placed(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_sparse_gradients_is_refused_unless_frozen(kind: Any) -> None:
    model = nn.ModuleDict({"words": kind(4, 2, sparse=True)})
    with pytest.raises(ConfigError, match="words has sparse gradients, .*: set sparse=False"):
        placed(model)
    placed(model.requires_grad_(False))
