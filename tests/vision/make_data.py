"""Small datasets on disk, whole or broken in one place."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from accel_trainer.vision import ImageSplit, Normalization


def random_images(count: int, *, seed: int = 0, size: int = 8) -> NDArray[np.uint8]:
    """[N, H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def random_split(count: int, *, num_classes: int = 10, size: int = 8, seed: int = 0) -> ImageSplit:
    import torch

    images = torch.from_numpy(random_images(count, seed=seed, size=size)).permute(0, 3, 1, 2)
    labels = torch.arange(count) % num_classes
    return ImageSplit(images=images, labels=labels, num_classes=num_classes)


NORMALIZATION = Normalization(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))


def png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(
    path: Path,
    encoded: Sequence[bytes | None],
    labels: Sequence[int | None],
    *,
    image_column: str = "img",
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = pa.array(
        [{"bytes": data, "path": None} for data in encoded],
        type=pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table({image_column: images, label_column: pa.array(labels, type=pa.int64())})
    if class_names is not None:
        features = {label_column: {"names": list(class_names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    pq.write_table(table, path)


def write_parquet_folder(
    root: Path, *, num_train: int = 12, num_test: int = 5
) -> NDArray[np.uint8]:
    """Write a small dataset of 3 classes and return its training images [N, H, W, 3]."""
    train, test = random_images(num_train), random_images(num_test, seed=1)
    names = ["ant", "bee", "cow"]
    for name, images in (("train", train), ("test", test)):
        write_parquet(
            root / f"{name}.parquet",
            [png(image) for image in images],
            [index % 3 for index in range(len(images))],
            class_names=names,
        )
    return train


def write_image_folder(root: Path, *, per_class: int = 3) -> None:
    for split in ("train", "test"):
        for label, name in enumerate(("ant", "bee")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index, image in enumerate(random_images(per_class, seed=label)):
                (folder / f"{index}.png").write_bytes(png(image))
