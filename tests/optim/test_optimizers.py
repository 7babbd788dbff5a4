from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from accel_trainer.checkpoint.state_dict import training_state
from accel_trainer.core.errors import ConfigError
from accel_trainer.optim.config import OptimizerConfig
from accel_trainer.optim.optimizers import build_optimizer
from accel_trainer.optim.parameter_groups import parameter_groups

from ..workload import SmallNet


def small_net(*, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return SmallNet(norm="batch").to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        images = torch.randn(8, 3, 8, 8, generator=generator, dtype=dtype)
        model(images.to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_alone_shrinks_filters_and_leaves_vectors(name: str) -> None:
    model = small_net()
    nn.init.ones_(model.layers[9].bias)
    optimizer = build_optimizer(
        model, OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5)
    )
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # The coupled decay of SGD passes through Nesterov's momentum: 1 + 0.9.
    shrunk = {"sgd": None, "adamw": 1 - 0.1 * 0.5}[name]
    for key, after in weights(model).items():
        if after.ndim == 1:
            assert torch.equal(after, before[key]), key
        elif shrunk is None:
            torch.testing.assert_close(
                after, before[key] * (1 - 0.1 * 0.5 * 1.9), rtol=1e-12, atol=0
            )
        else:
            torch.testing.assert_close(after, before[key] * shrunk, rtol=1e-12, atol=0)


REFERENCES: dict[str, tuple[OptimizerConfig, Any]] = {
    "nesterov": (
        OptimizerConfig(learning_rate=0.01),
        lambda groups: SGD(
            groups, lr=0.01, momentum=0.9, nesterov=True, foreach=False, fused=False
        ),
    ),
    "momentum": (
        OptimizerConfig(learning_rate=0.01, momentum=0.5, nesterov=False),
        lambda groups: SGD(groups, lr=0.01, momentum=0.5, foreach=False, fused=False),
    ),
    "plain": (
        OptimizerConfig(learning_rate=0.01, momentum=0.0),
        lambda groups: SGD(groups, lr=0.01, foreach=False, fused=False),
    ),
    "adamw": (
        OptimizerConfig(name="adamw", learning_rate=0.01, betas=(0.8, 0.95), eps=1e-6),
        lambda groups: AdamW(
            groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, foreach=False, fused=False
        ),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_fused_optimizer_equals_the_plain_loop_of_torch(name: str) -> None:
    config, reference = REFERENCES[name]
    model, twin = small_net(), small_net()
    optimizer = build_optimizer(model, config)
    assert all(group["fused"] for group in optimizer.param_groups)
    groups = parameter_groups(twin, config)
    train(model, optimizer, range(20))
    train(twin, reference(groups), range(20))
    theirs = weights(twin)
    for key, mine in weights(model).items():
        torch.testing.assert_close(mine, theirs[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_optimizer_state_returns_to_the_layout_of_the_parameters(
    name: str, layout: torch.memory_format
) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01)

    def fresh() -> tuple[nn.Module, Optimizer]:
        model = small_net(dtype=torch.float32).to(memory_format=layout)
        return model, build_optimizer(model, config)

    model, optimizer = fresh()
    train(model, optimizer, range(3))
    stored = as_stored(training_state(model, {"": optimizer}, None, None).state_dict())
    train(model, optimizer, range(3, 6))

    resumed, resumed_optimizer = fresh()
    training_state(resumed, {"": resumed_optimizer}, None, None).load_state_dict(stored)
    for parameter, state in resumed_optimizer.state.items():
        tensors = [value for value in state.values() if value.ndim]
        assert tensors
        assert all(value.stride() == parameter.stride() for value in tensors)
    train(resumed, resumed_optimizer, range(3, 6))
    theirs = weights(model)
    for key, mine in weights(resumed).items():
        assert torch.equal(mine, theirs[key]), key


def as_stored(pieces: Any) -> Any:
    """Copies whose tensors are contiguous, as a file gives them back."""
    if isinstance(pieces, Tensor):
        return pieces.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(pieces, dict):
        return {key: as_stored(value) for key, value in pieces.items()}
    if isinstance(pieces, list):
        return [as_stored(value) for value in pieces]
    return copy.deepcopy(pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -0.1}, "optimizer.learning_rate is -0.1: set it to at least 0"),
        ({"learning_rate": math.nan}, "optimizer.learning_rate is nan"),
        ({"learning_rate": math.inf}, "optimizer.learning_rate is inf"),
        ({"momentum": 1.0}, "optimizer.momentum is 1.0: set it to at least 0 and below 1"),
        ({"weight_decay": -1e-4}, "optimizer.weight_decay is -0.0001"),
        ({"eps": -1.0}, "optimizer.eps is -1.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas is \(0.9, 1.0\)"),
        ({"base_batch_size": 0}, "optimizer.base_batch_size is 0: set it to 1 or more"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**changes)
