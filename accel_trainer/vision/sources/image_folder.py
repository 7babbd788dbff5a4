"""Reads image files in one folder per class: `train/<class>/*` and `test/<class>/*`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.decode import EncodedSplit, decode_on_demand
from .class_names import numbers_in
from .photo_folders import class_of
from .photos import refuse_untrained
from .raw import RawImages


def read_image_folder(train: Sequence[str], test: Sequence[str]) -> RawImages:
    """Read files whose folders are their classes; the training classes are numbered by name."""
    class_names = tuple(sorted({class_of(path) for path in (*train, *test)}))
    splits = [_split(files, class_names) for files in (train, test)]
    if train:
        refuse_untrained(splits[0].labels, splits[1].labels, class_names, splits[1].name_of)
    return decode_on_demand(*splits, class_names=class_names)


def _split(files: Sequence[str], class_names: tuple[str, ...]) -> EncodedSplit:
    return EncodedSplit(
        labels=numbers_in(class_names, [class_of(path) for path in files]),
        encoded_at=lambda index: Path(files[index]),
        name_of=lambda index: files[index],
    )
