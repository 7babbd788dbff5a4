"""Residual networks: the CIFAR family of He et al. 2015, and ResNet-18, 34, 50 and 101.

The names of parameters are torchvision's.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockSequence, Norm, convolution, initialize, make_norm

Shortcut = Literal["pad", "projection"]
Stem = Literal["cifar", "imagenet"]


class PadShortcut(nn.Module):
    """Option A of He et al. 2015: subsampling, and channels of zeros. It has no parameters."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.extra_channels = out_channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + extra, ceil(H / stride), ceil(W / stride)]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


def _shortcut(
    kind: Shortcut, in_channels: int, out_channels: int, *, stride: int, norm: Norm
) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(in_channels, out_channels, stride=stride)
    return nn.Sequential(
        convolution(in_channels, out_channels, kernel=1, stride=stride),
        make_norm(norm, out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, *, stride: int, norm: Norm, shortcut: Shortcut
    ) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, width, kernel=3, stride=stride)
        self.bn1 = make_norm(norm, width)
        self.conv2 = convolution(width, width, kernel=3)
        self.bn2 = make_norm(norm, width)
        self.downsample = _shortcut(shortcut, in_channels, width, stride=stride, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, width, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class BottleneckBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is on the 3x3, as in torchvision."""

    expansion = 4

    def __init__(
        self, in_channels: int, width: int, *, stride: int, norm: Norm, shortcut: Shortcut
    ) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = convolution(in_channels, width, kernel=1)
        self.bn1 = make_norm(norm, width)
        self.conv2 = convolution(width, width, kernel=3, stride=stride)
        self.bn2 = make_norm(norm, width)
        self.conv3 = convolution(width, out_channels, kernel=1)
        self.bn3 = make_norm(norm, out_channels)
        self.downsample = _shortcut(shortcut, in_channels, out_channels, stride=stride, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, 4 * width, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """A stem, stages that halve H and W and double the channels, mean over H and W, a linear head.

    The `cifar` stem is a 3x3 convolution that keeps H and W; the `imagenet` stem, a strided 7x7
    convolution and a maximum, divides them by 4.
    """

    def __init__(
        self,
        blocks_per_stage: Sequence[int],
        *,
        block: type[BasicBlock] | type[BottleneckBlock],
        width: int,
        stem: Stem,
        shortcut: Shortcut,
        norm: Norm,
        dropout: float,
        recompute: bool,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        is_large = stem == "imagenet"
        self.conv1 = convolution(
            in_channels,
            width,
            kernel=7 if is_large else 3,
            stride=2 if is_large else 1,
        )
        self.bn1 = make_norm(norm, width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if is_large else nn.Identity()
        channels = width
        self._num_stages = len(blocks_per_stage)
        for stage, num_blocks in enumerate(blocks_per_stage):
            blocks: list[nn.Module] = []
            stage_width = width * 2**stage
            for position in range(num_blocks):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(
                    block(channels, stage_width, stride=stride, norm=norm, shortcut=shortcut)
                )
                channels = stage_width * block.expansion
            self.add_module(f"layer{stage + 1}", BlockSequence(blocks, recompute=recompute))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in self._stages():
            x = stage(x)
        logits: Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits

    def _stages(self) -> list[BlockSequence]:
        return [getattr(self, f"layer{number}") for number in range(1, self._num_stages + 1)]
