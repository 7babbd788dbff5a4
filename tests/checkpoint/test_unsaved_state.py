"""State of a user's parts that torch's own do not have: kept in a checkpoint and brought back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from accel_trainer.checkpoint.serialization import decode, encode
from accel_trainer.checkpoint.state_dict import training_state

from .test_state_dict import Trained


class Counting(SGD):
    """Its rate depends on a counter that only `state_dict` shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.k = 0

    def step(self, closure: Any = None) -> None:
        self.k += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1 / self.k)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k, "seen": {"steps": [self.k]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["seen"] == {"steps": [state["k"]]}
        self.k = state["k"]


class Lookahead(Optimizer):
    """Slow weights beside those of another optimizer; its state dict has a form of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.fast = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.fast.step()
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(parameter.data, 0.5)
            parameter.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        fast = self.fast.state_dict()
        return {
            "fast": fast["state"],
            "slow": list(self.slow),
            "param_groups": fast["param_groups"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fast.load_state_dict({"state": state["fast"], "param_groups": state["param_groups"]})
        for slow, stored in zip(self.slow, state["slow"], strict=True):
            slow.copy_(stored)


class Cached(nn.Module):
    """A table that grows with the longest input, and a centre: neither is in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("centre", torch.zeros(4), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(self.table) < len(inputs):
            self.table = torch.arange(float(len(inputs)))
        outputs = self.linear(inputs) - self.centre + self.table[:2].sum()
        if self.training:
            self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return outputs


def make(model: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer]) -> Trained:
    torch.manual_seed(0)
    built = model()
    stepped = optimizer(built.parameters())
    return Trained(built, stepped, training_state(built, {"": stepped}))


def saved(state: Trained) -> dict[str, Any]:
    encoded = {
        name: encode(piece, name=name) for name, piece in copy.deepcopy(state.state_dict()).items()
    }
    return {name: decode(each.skeleton, each.tensors) for name, each in encoded.items()}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (lambda: nn.Linear(4, 4), Counting),
        (lambda: nn.Linear(4, 4), Lookahead),
        (Cached, lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)),
    ],
    ids=["optimizer-counter", "optimizer-lookahead", "non-persistent-buffers"],
)
def test_state_that_torchs_own_parts_do_not_have_is_restored(model: Any, optimizer: Any) -> None:
    whole, before, after = (make(model, optimizer) for _ in range(3))
    steps(whole, 0, 6)
    steps(before, 0, 3)
    after.load_state_dict(saved(before))
    steps(after, 3, 6)
    expected, found = (dict(state.model.named_parameters()) for state in (whole, after))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def steps(state: Trained, first: int, end: int) -> None:
    for step in range(first, end):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def test_buffers_that_training_leaves_alone_are_not_stored() -> None:
    state = make(Cached, lambda parameters: SGD(parameters, lr=0.1))
    assert "buffers" not in state.state_dict()
    steps(state, 0, 1)
    assert sorted(state.state_dict()["buffers"]["model"]) == ["centre", "table"]
