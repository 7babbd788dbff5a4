"""Residual networks for small images: the CIFAR family of He et al. 2015, and ResNet-18, 34 and 50.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockSequence, Norm, convolution, initialize, make_norm

Shortcut = Literal["pad", "projection"]


class PadShortcut(nn.Module):
    """Option A of He et al. 2015: subsample and pad channels with zeros. It has no parameters."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.extra_channels, self.stride = out_channels - in_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + extra, ceil(H / stride), ceil(W / stride)]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


def _shortcut(kind: Shortcut, in_channels: int, out_channels: int, *, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(in_channels, out_channels, stride=stride)
    return nn.Sequential(convolution(in_channels, out_channels, kernel=1, stride=stride), make_norm(norm, out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, *, stride: int, norm: Norm, shortcut: Shortcut) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(in_channels, width, kernel=3, stride=stride),
            make_norm(norm, width),
            nn.ReLU(inplace=True),
            convolution(width, width, kernel=3),
            make_norm(norm, width),
        )
        self.shortcut = _shortcut(shortcut, in_channels, width, stride=stride, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, width, H / stride, W / stride]."""
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class BottleneckBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is on the 3x3, as in torchvision."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, *, stride: int, norm: Norm, shortcut: Shortcut) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.residual = nn.Sequential(
            convolution(in_channels, width, kernel=1),
            make_norm(norm, width),
            nn.ReLU(inplace=True),
            convolution(width, width, kernel=3, stride=stride),
            make_norm(norm, width),
            nn.ReLU(inplace=True),
            convolution(width, out_channels, kernel=1),
            make_norm(norm, out_channels),
        )
        self.shortcut = _shortcut(shortcut, in_channels, out_channels, stride=stride, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, 4 * width, H / stride, W / stride]."""
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A 3x3 stem, stages that halve H and W and double the channels, mean over H and W, a linear head."""

    def __init__(
        self,
        blocks_per_stage: Sequence[int],
        *,
        block: type[BasicBlock] | type[BottleneckBlock],
        width: int,
        shortcut: Shortcut,
        norm: Norm,
        dropout: float,
        recompute: bool,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(in_channels, width, kernel=3), make_norm(norm, width), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, num_blocks in enumerate(blocks_per_stage):
            for position in range(num_blocks):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride=stride, norm=norm, shortcut=shortcut))
                channels = width * 2**stage * block.expansion
        self.blocks = BlockSequence(blocks, recompute=recompute)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        features: Tensor = self.blocks(self.stem(images))
        logits: Tensor = self.head(self.dropout(features.mean((2, 3))))
        return logits
