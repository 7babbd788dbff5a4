"""ResNet-9 (D. Page, "How to train your ResNet", 2018): the small network of fast CIFAR training.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from .blocks import BlockSequence, Norm, convolution, initialize, make_norm

# Page's fixed factor on the logits: without it the softmax saturates at his learning rates.
_LOGIT_SCALE = 0.125


def _unit(in_channels: int, out_channels: int, norm: Norm, *, pool: bool = False) -> nn.Sequential:
    layers = [convolution(in_channels, out_channels, kernel=3), make_norm(norm, out_channels)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), *([nn.MaxPool2d(2)] if pool else []))


class _Residual(nn.Module):
    """Two units around an identity shortcut."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.units = nn.Sequential(_unit(channels, channels, norm), _unit(channels, channels, norm))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape."""
        total: Tensor = x + self.units(x)
        return total


class ResNet9(nn.Module):
    """Eight convolutions of `width` to 8 `width` channels, maximum over H and W, a linear head."""

    def __init__(
        self,
        *,
        width: int,
        norm: Norm,
        dropout: float,
        recompute: bool,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = [
            _unit(in_channels, width, norm),
            _unit(width, 2 * width, norm, pool=True),
            _Residual(2 * width, norm),
            _unit(2 * width, 4 * width, norm, pool=True),
            _unit(4 * width, 8 * width, norm, pool=True),
            _Residual(8 * width, norm),
        ]
        self.blocks = BlockSequence(blocks, recompute=recompute)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8 * width, num_classes, bias=False)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, K]."""
        features: Tensor = self.blocks(images)
        logits: Tensor = self.head(self.dropout(features.amax((2, 3)))) * _LOGIT_SCALE
        return logits
