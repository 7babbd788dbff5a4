"""The networks of K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498).

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockSequence, Norm, convolution, make_norm

_STEM_KERNEL = 2


def _norm(kind: Norm, channels: int, momentum: float) -> nn.Module:
    """Build a norm whose scale stays 1: only its bias is trained."""
    norm = make_norm(kind, channels)
    if isinstance(norm, nn.BatchNorm2d):
        norm.momentum = momentum
        norm.eps = 1e-12
    assert isinstance(norm.weight, nn.Parameter)
    norm.weight.requires_grad_(False)
    return norm


def _unit(
    in_channels: int, out_channels: int, *, norm: Norm, momentum: float, pool: bool = False
) -> nn.Sequential:
    """Build a convolution with pooling, a norm and GELU.

    The filters of its first output channels are the identity.
    """
    filters = convolution(in_channels, out_channels, kernel=3)
    nn.init.dirac_(filters.weight.data[:in_channels])
    return nn.Sequential(
        filters,
        *([nn.MaxPool2d(2)] if pool else []),
        _norm(norm, out_channels, momentum),
        nn.GELU(),
    )


class ConvGroup(nn.Module):
    """A convolution with pooling that halves H and W, then another, or two with a shortcut."""

    def __init__(
        self, in_channels: int, out_channels: int, *, is_residual: bool, norm: Norm, momentum: float
    ) -> None:
        super().__init__()
        self.is_residual = is_residual
        self.first = _unit(in_channels, out_channels, norm=norm, momentum=momentum, pool=True)
        others = [
            _unit(out_channels, out_channels, norm=norm, momentum=momentum)
            for _ in range(1 + is_residual)
        ]
        if is_residual:
            del others[-1][-1]  # `forward` applies the last activation, after the sum
        self.others = nn.Sequential(*others)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, out_channels, H // 2, W // 2]."""
        x = self.first(x)
        y: Tensor = self.others(x)
        return F.gelu(x + y) if self.is_residual else y


class Airbench(nn.Module):
    """A frozen 2x2 stem, three groups of convolutions, maximum over H and W, a linear head.

    `whiten` sets the filters of the stem from training images; otherwise they are random. Images
    must have at least 16 pixels on each side.
    """

    def __init__(
        self,
        *,
        widths: Sequence[int],
        is_residual: bool,
        norm_momentum: float,
        norm: Norm,
        dropout: float,
        recompute: bool,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        # One channel for each principal direction, and one for its negative.
        stem_channels = 2 * in_channels * _STEM_KERNEL**2
        self.stem = nn.Conv2d(in_channels, stem_channels, _STEM_KERNEL)
        self.stem.weight.requires_grad_(False)
        assert self.stem.bias is not None
        nn.init.zeros_(self.stem.bias)
        channels = [stem_channels, *widths]
        groups: list[nn.Module] = [
            ConvGroup(before, after, is_residual=is_residual, norm=norm, momentum=norm_momentum)
            for before, after in zip(channels, widths, strict=False)
        ]
        self.blocks = BlockSequence(groups, recompute=recompute)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight)
        self.logit_scale = 1 / channels[-1]

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        features: Tensor = self.blocks(F.gelu(self.stem(images)))
        logits: Tensor = self.head(self.dropout(features.amax((2, 3)))) * self.logit_scale
        return logits
