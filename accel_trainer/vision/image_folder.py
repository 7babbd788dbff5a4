"""Image files in a folder for each class: `train/<class>/*` and `test/<class>/*`.

Shapes: C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .decode import Decoder
from .raw import RawImages, RawSplit


def list_images(folder: Path) -> list[Path]:
    """Return the files of all class folders, sorted, so that a sample's id is the same on every machine."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [
        path
        for class_folder in classes
        for path in sorted(class_folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
    ]


def read_image_folder(train: Sequence[Path], test: Sequence[Path]) -> RawImages:
    """Read files as `list_images` returns them. The training classes, sorted by name, are the labels."""
    class_names = tuple(sorted({path.parent.name for path in train}))
    return RawImages(
        train=_raw_split(train, class_names), test=_raw_split(test, class_names), class_names=class_names
    )


def _raw_split(files: Sequence[Path], class_names: tuple[str, ...]) -> RawSplit:
    label_of = {name: label for label, name in enumerate(class_names)}
    for path in files:
        if path.parent.name not in label_of:
            raise DataError(
                "DATA_LABEL",
                f"{path} is of class {path.parent.name!r}, which no training image has: "
                f"the classes are {', '.join(class_names)}",
            )
    decode = Decoder.like(files[0], name=str(files[0])) if files else None

    def image_at(index: int) -> NDArray[np.uint8]:
        assert decode is not None
        return decode(files[index], name=str(files[index]))

    labels = np.array([label_of[path.parent.name] for path in files], dtype=np.int64)
    return RawSplit(labels=labels, image_at=image_at, name_of=lambda index: str(files[index]))
