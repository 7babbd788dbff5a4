"""The parts that the image models share: convolution, norm, and recomputed blocks.

Shapes: B batch (may be 0), C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

Norm = Literal["batch", "group"]

# A group then has two or more channels, even with the 16 channels of the narrowest models.
_MAX_GROUPS = 8


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Build the norm layer for [B, C, H, W] with `channels` = C."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(_MAX_GROUPS, channels), channels)


def convolution(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution that divides H and W by the stride. No bias, because a norm follows."""
    return nn.Conv2d(
        in_channels,
        out_channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        bias=False,
    )


def initialize(model: nn.Module) -> None:
    """Draw convolution weights from the fan-out normal distribution of He et al. 2015.

    The paper is "Delving deep into rectifiers".
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BlockSequence(nn.Sequential):
    """A sequence of blocks; with `recompute`, backward recomputes the activations of each block."""

    def __init__(self, blocks: list[nn.Module], *, recompute: bool) -> None:
        super().__init__(*blocks)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] through all blocks."""
        for block in self:
            x = _recomputed(block, x) if self.recompute and torch.is_grad_enabled() else block(x)
        return x


def _recomputed(block: nn.Module, x: Tensor) -> Tensor:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(block)

    # Compiled recomputation never writes buffers, and supports no contexts.
    if torch.compiler.is_compiling():
        result = checkpoint(block, x, use_reentrant=False)
    else:
        result = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    assert isinstance(result, Tensor)
    return result


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics as they are: the first pass has already updated them."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # `track_running_stats` stays: recomputation must save as many tensors as the first pass.
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, num_batches_tracked) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = num_batches_tracked
