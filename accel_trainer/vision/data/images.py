"""Decoded image datasets.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...core.errors import DataError
from ...core.filesystem import sha256_of, stamp_of
from ..sources.class_names import Names
from .bad_images import BadImage


class MappedFile(NamedTuple):
    """A memory-mapped file with its hash, and its state before this was verified."""

    path: Path
    sha256: str
    status: os.stat_result

    def check(self) -> None:
        """Raise DataError if the content of the file has changed since its hash was verified."""
        try:
            now = self.path.stat()
            is_same = now.st_ino != self.status.st_ino or stamp_of(now) == stamp_of(self.status)
            if is_same or sha256_of(self.path) == self.sha256:
                return  # the mapping keeps the content of a replaced file
        except OSError:
            return  # and of a deleted one
        fact = (
            f"{self.path} was changed while the run read it ({self.status.st_size} -> "
            f"{now.st_size} bytes), so the last epoch may have seen different images"
        )
        fix = (
            "stop the program that writes there, delete the checkpoints of that epoch and run "
            "the same command again, which rebuilds the cache"
        )
        raise DataError("CACHE_CHANGED", f"{fact}: {fix}")


@dataclass(frozen=True, kw_only=True)
class ImageSplit:
    """`images` uint8 [N, C, H, W], channels last in memory, and their `labels` int64 [N].

    Labels are below `num_classes`. The images are memory-mapped, so the processes of a machine
    share them. `left_out` are the images of the source that could not be used; `files` are the
    mapped files.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    left_out: tuple[BadImage, ...] = ()
    files: tuple[MappedFile, ...] = ()

    def __len__(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Per-channel mean and standard deviation, for pixels in 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Two splits of labelled images.

    `fingerprint` is a SHA-256 of all pixels, labels and class names; `normalization` is computed
    from the training split. A run warns of the `notes`, such as files that are left out, and prints
    the `facts` at its start.
    """

    train: ImageSplit
    test: ImageSplit
    class_names: Names
    normalization: Normalization
    fingerprint: str
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)

    @property
    def image_size(self) -> tuple[int, int]:
        """The height and width of all images."""
        return tuple(self.train.images.shape[2:])  # type: ignore[return-value]  # there are two

    @property
    def num_channels(self) -> int:
        """The number of channels, C: 3 for colour, 1 for greyscale."""
        return self.train.images.shape[1]
