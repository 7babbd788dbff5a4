"""Decoded image data sets: what a loader or a model needs to know about them.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .bad_images import BadImage


@dataclass(frozen=True, kw_only=True)
class ImageSplit:
    """`images` uint8 [N, C, H, W], channels last in memory, and their `labels` int64 [N] below `num_classes`.

    The images are a file mapped into memory: the processes of one machine share its pages. `left_out`
    are the images of its source that could not be used.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    left_out: tuple[BadImage, ...] = ()

    def __len__(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Per-channel mean and standard deviation, for pixels in 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Two splits of labelled images. `fingerprint` is a SHA-256 of all pixels, labels and class names.

    `normalization` is that of the training split.
    """

    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    normalization: Normalization
    fingerprint: str

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)

    @property
    def num_channels(self) -> int:
        """C, the number of channels: 3 for colour, 1 for grey."""
        return self.train.images.shape[1]
