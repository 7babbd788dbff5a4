"""Reads image files in one folder per class: `train/<class>/*` and `test/<class>/*`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.errors import DataError
from ..data.decode import EncodedSplit, decode_on_demand
from .raw import RawImages


def list_images(folder: Path) -> list[Path]:
    """Return the files of all class folders, sorted: sample ids are the same on every machine."""
    classes = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    return [
        path
        for class_folder in classes
        for path in sorted(class_folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
    ]


def read_image_folder(train: Sequence[Path], test: Sequence[Path]) -> RawImages:
    """Read the files that `list_images` returns; the training classes are numbered by name."""
    class_names = tuple(sorted({path.parent.name for path in train}))
    return decode_on_demand(
        _split(train, class_names),
        _split(test, class_names),
        class_names=class_names,
    )


def _split(files: Sequence[Path], class_names: tuple[str, ...]) -> EncodedSplit:
    label_of = {name: label for label, name in enumerate(class_names)}
    for path in files:
        if path.parent.name not in label_of:
            raise DataError(
                "DATA_LABEL",
                f"{path} is of class {path.parent.name!r}, which no training image has: "
                f"the classes are {', '.join(class_names)}",
            )
    labels = np.array([label_of[path.parent.name] for path in files], dtype=np.int64)
    return EncodedSplit(
        labels=labels,
        encoded_at=lambda index: files[index],
        name_of=lambda index: str(files[index]),
    )
