"""Photographs of many sizes, modes and formats, and folders of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from accel_trainer.vision import EvalTransform, Photos, PhotoSplit


@cache
def photograph(index: int = 0) -> Image.Image:
    """One of scikit-learn's two photographs, 640 x 427 pixels."""
    load_sample_images = pytest.importorskip("sklearn.datasets").load_sample_images

    return Image.fromarray(load_sample_images().images[index])


def photo(width: int, height: int, *, seed: int = 0) -> Image.Image:
    """A part of a photograph, resized to `width` x `height`."""
    random = np.random.default_rng(seed)
    whole = photograph(seed % 2)
    left, top = int(random.integers(0, 300)), int(random.integers(0, 200))
    return whole.resize((width, height), box=(left, top, left + 300, top + 200))


def encoded(image: Image.Image, kind: str = "jpeg", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    """What Pillow makes of it: uint8 [H, W, 3]."""
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def write_photos(folder: Path, names: Iterable[str], *, size: tuple[int, int] = (40, 30)) -> Path:
    """Write different small JPEG files, whatever their suffix."""
    for place, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(size[0] + place % 3, size[1], seed=place)))
    return folder


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_classes(
    folder: Path, classes: Iterable[str] = ("ant", "bee"), *, per_class: int = 3
) -> Path:
    """Write `per_class` photos into each of the class folders."""
    return write_photos(
        folder, [f"{name}/{index}.jpg" for name in classes for index in range(per_class)]
    )


def split_of(photos: Sequence[bytes], *, num_classes: int = 3) -> PhotoSplit:
    """A split of encoded photos, whose classes take turns."""
    labels = np.arange(len(photos), dtype=np.int64) % num_classes
    return PhotoSplit(
        labels=labels, encoded_at=photos.__getitem__, name_of=lambda index: f"photo {index}"
    )


@cache
def mixed_photos(count: int) -> tuple[bytes, ...]:
    """Photos of different sizes and formats."""
    return tuple(
        encoded(
            photo(20 + 7 * (index % 5), 18 + 5 * (index % 3), seed=index),
            "png" if index % 4 == 3 else "jpeg",
        )
        for index in range(count)
    )


def decode_all(photos: Photos) -> None:
    """Read each photo to its last pixel."""
    transform = EvalTransform(size=8)
    for split in (photos.train, photos.val):
        for index in range(len(split)):
            assert transform(split.encoded_at(index), split.name_of(index)).shape == (8, 8, 3)
