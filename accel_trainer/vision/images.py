"""Decoded image data sets: what a loader or a model needs to know about them.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..errors import DataError
from .bad_images import BadImage


class MappedFile(NamedTuple):
    """A file that is mapped into memory, as it stood when its hash was verified."""

    path: Path
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path) -> MappedFile:
        """Describe the file as it is now. Raises OSError."""
        status = path.stat()
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raise DataError if something has written to the file since."""
        try:
            now = MappedFile.at(self.path)
        except OSError:
            return  # a mapping keeps a file that was deleted, or replaced by another, as it was
        if now.inode == self.inode and now != self:
            raise DataError(
                "CACHE_CHANGED",
                f"{self.path} was changed while the run read it ({self.size_bytes} -> {now.size_bytes} bytes), so "
                "the last epoch may have seen other images: stop what writes there, delete the checkpoints of that "
                "epoch and start the same command again, which rebuilds the cache",
            )


@dataclass(frozen=True, kw_only=True)
class ImageSplit:
    """`images` uint8 [N, C, H, W], channels last in memory, and their `labels` int64 [N] below `num_classes`.

    The images are a file mapped into memory: the processes of one machine share its pages. `left_out`
    are the images of its source that could not be used; `files` are those that are mapped.
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
