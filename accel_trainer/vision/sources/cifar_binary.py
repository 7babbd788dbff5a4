"""Reads the "binary version" of CIFAR-10 and CIFAR-100.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import DataError
from ..data.photo_decode import Pixels
from .raw import RawImages, RawSplit

_IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class BinaryFiles:
    """The files of one dataset.

    A record is `label_bytes` bytes, the last of which is the label, followed by an image.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    label_bytes: int
    names_file: Path


def find_binary(folder: Path) -> BinaryFiles | None:
    """Return the binary files of CIFAR in `folder`, None if there are none."""
    if batches := tuple(sorted(folder.glob("data_batch_*.bin"))):
        return BinaryFiles(
            train=batches,
            test=(_required(folder / "test_batch.bin"),),
            label_bytes=1,
            names_file=folder / "batches.meta.txt",
        )
    if (folder / "train.bin").is_file():
        return BinaryFiles(
            train=(folder / "train.bin",),
            test=(_required(folder / "test.bin"),),
            label_bytes=2,  # the coarse label, then the fine one
            names_file=folder / "fine_label_names.txt",
        )
    return None


def refuse_pickles(folder: Path) -> None:
    """Raise DataError if `folder` has CIFAR's "python version": opening a pickle can run code."""
    for marker in ("data_batch_1", "batches.meta", "meta"):
        if (folder / marker).is_file():
            fact = (
                f"{folder / marker} is a Python pickle, which can run code when opened, so it is "
                "not read"
            )
            fix = 'download the "binary version" of CIFAR, or parquet from the hub'
            raise DataError("DATA_PICKLE", f"{fact}: {fix}")


def _required(path: Path) -> Path:
    if not path.is_file():
        raise DataError("DATA_NOT_FOUND", f"no {path}: extract the archive again")
    return path


def read_binary(files: BinaryFiles) -> RawImages:
    """Read all records into memory."""
    try:
        names = tuple(files.names_file.read_text(encoding="utf-8").split()) or None
    except FileNotFoundError:
        names = None
    return RawImages(
        train=_raw_split(files.train, files.label_bytes),
        test=_raw_split(files.test, files.label_bytes),
        class_names=names,
    )


def _raw_split(paths: Sequence[Path], label_bytes: int) -> RawSplit:
    files = [_records(path, label_bytes) for path in paths]
    records = np.concatenate(files)  # [N, label_bytes + 3072]
    ends = np.cumsum([len(each) for each in files])

    def name_of(index: int) -> str:
        file = int(np.searchsorted(ends, index, side="right"))
        return f"record {index - (ends[file] - len(files[file]))} of {paths[file]}"

    def image_at(index: int) -> Pixels:
        image = records[index, label_bytes:].reshape(_IMAGE_SHAPE)
        pixels: Pixels = image.transpose(1, 2, 0)
        return pixels

    return RawSplit(
        labels=records[:, label_bytes - 1].astype(np.int64),
        image_at=image_at,
        name_of=name_of,
    )


def _records(path: Path, label_bytes: int) -> Pixels:
    data = np.fromfile(path, dtype=np.uint8)
    record_bytes = label_bytes + _IMAGE_BYTES
    if len(data) % record_bytes:
        fact = f"{path} has {len(data)} bytes, not a multiple of {record_bytes}"
        raise DataError("DATA_BINARY", f"{fact}: it is truncated, download it again")
    return data.reshape(-1, record_bytes)
