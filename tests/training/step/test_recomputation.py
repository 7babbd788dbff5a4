"""A model that recomputes its forwards in the backward changes its buffers once in a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..planted import make_config, train


class Net(nn.Module):
    """A block with running statistics, and a head; `recompute` calls the block."""

    def __init__(self, recompute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), Centre(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.recompute(self.block, inputs) if self.training else self.block(inputs)
        logits: Tensor = self.head(hidden)
        return logits


class Centre(nn.Module):
    """Subtracts a running mean, and counts in its buffer how often; assigned, not in place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("num_gradients", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        outputs = inputs - self.mean.clone()
        if outputs.requires_grad:
            outputs.register_hook(self.count)
        return outputs

    def count(self, gradient: Tensor) -> None:
        """Count in the backward alone, which is not put back."""
        self.num_gradients += 1


def plain(block: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = block(inputs)
    return outputs


def late(block: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = checkpoint(block, inputs, use_reentrant=False)
    return outputs


def reentrant(block: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = checkpoint(block, inputs.clone().requires_grad_(), use_reentrant=True)
    return outputs


def in_parts(block: Any, inputs: Tensor) -> Tensor:
    outputs: Tensor = checkpoint_sequential(block, 2, inputs, use_reentrant=False)
    return outputs


def trained(
    folder: Path, recompute: Callable[..., Tensor], *, max_steps: int = 5
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    train(make_config(folder, max_steps=max_steps), model=lambda: Net(recompute))
    return load_file(folder / "export" / "model.safetensors")


@pytest.mark.parametrize("recompute", [late, reentrant, in_parts])
def test_recomputed_forwards_leave_the_bits_of_plain_ones(
    tmp_path: Path, recompute: Callable[..., Tensor]
) -> None:
    wanted = trained(tmp_path / "plain", plain)
    found = trained(tmp_path / "recomputed", recompute)
    trained(tmp_path / "parts", recompute, max_steps=3)
    resumed = trained(tmp_path / "parts", recompute)
    assert wanted["block.1.num_batches_tracked"] == wanted["block.3.num_gradients"] == 5
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(resumed[name], tensor), name
