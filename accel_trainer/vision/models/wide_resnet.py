"""Wide residual networks (Zagoruyko and Komodakis 2016): few layers, many channels.

A norm stands before each convolution.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockSequence, Norm, convolution, initialize, make_norm


class WideBlock(nn.Module):
    """Twice norm, ReLU and convolution, with dropout between them.

    The shortcut starts after the first ReLU.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.norm = make_norm(norm, in_channels)
        self.residual = nn.Sequential(
            convolution(in_channels, out_channels, kernel=3, stride=stride),
            make_norm(norm, out_channels),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            convolution(out_channels, out_channels, kernel=3),
        )
        self.projection: nn.Module | None = None
        if in_channels != out_channels:
            self.projection = convolution(in_channels, out_channels, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, out, H / stride, W / stride]."""
        active = F.relu(self.norm(x), inplace=True)
        shortcut = x if self.projection is None else self.projection(active)
        total: Tensor = self.residual(active) + shortcut
        return total


class WideResNet(nn.Module):
    """WRN-`depth`-`factor`: three stages of `(depth - 4) / 6` blocks.

    A block has `factor` times as many channels as in a ResNet.
    """

    def __init__(
        self,
        *,
        depth: int,
        factor: int,
        width: int,
        norm: Norm,
        dropout: float,
        recompute: bool,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = convolution(in_channels, width, kernel=3)
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for position in range((depth - 4) // 6):
                stride = 2 if stage > 0 and position == 0 else 1
                out_channels = width * factor * 2**stage
                blocks.append(
                    WideBlock(channels, out_channels, stride=stride, norm=norm, dropout=dropout)
                )
                channels = out_channels
        self.blocks = BlockSequence(blocks, recompute=recompute)
        self.norm = make_norm(norm, channels)
        self.head = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        features = F.relu(self.norm(self.blocks(self.stem(images))), inplace=True)
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits
