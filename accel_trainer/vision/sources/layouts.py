"""Recognises folders that are no classes, although they lie where class folders do."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import DataError

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("validation", "val", "valid", "dev", "test", "testing", "eval", "evaluation")
"""The names of splits to evaluate on; the first that exists is used."""
EXPECTED = (
    "train/<class>/*.jpg with or without val/<class>/*.jpg, <class>/*.jpg, metadata.csv, parquet, "
    "or tars"
)
"""What a folder of photos may look like, for messages."""

_IMAGE_FOLDERS = "image images img imgs jpegimages photo photos picture pictures rgb"
_MASK_FOLDERS = (
    "annotation annotations depth groundtruth gt label labels mask masks seg segmentation "
    "segmentationclass segmentationobject segmentations"
)
_IMAGES = frozenset(_IMAGE_FOLDERS.split())
_MASKS = frozenset(_MASK_FOLDERS.split())
_FILLERS = _IMAGES | {"data", "dataset", "folder", "set", "split"}
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".xlsx", ".xls", ".txt")


def refuse_other_layouts(root: Path, names: Sequence[str]) -> None:
    """Raise DataError if `names` of folders are those of splits, or of images and their masks."""
    images = [name for name in names if name.lower() in _IMAGES]
    masks = [name for name in names if name.lower() in _MASKS]
    if images and masks:
        fact = f"{root} has no class folders: {images[0]}/ and {masks[0]}/ belong together"
        raise DataError("DATA_NO_CLASSES", f"{fact}: expected {EXPECTED}")
    plain = {*TRAIN_NAMES, *VAL_NAMES}
    roles = {name: role for name in names if (role := _split_role(name)) is not None}
    for train, (kind, words) in roles.items():
        for val, (other_kind, other_words) in roles.items():
            is_pair = kind in TRAIN_NAMES and other_kind in VAL_NAMES and words == other_words
            if is_pair and not {train.lower(), val.lower()} <= plain:
                fact = f"{root} has {train}/ and {val}/, which look like splits, not like classes"
                raise DataError("DATA_NOT_RECOGNISED", f"{fact}: rename them to train/ and val/")


def _split_role(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the split that `train_images` or `seg_test` is named after, and the other words.

    None: the name has no word of a split, or two.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
    splits = [word for word in words if word in TRAIN_NAMES or word in VAL_NAMES]
    others = tuple(word for word in words if word not in splits and word not in _FILLERS)
    return (splits[0], others) if len(splits) == 1 else None


def find_table(files: Sequence[str]) -> str | None:
    """Return the first file that may list labels, such as `labels.csv`; None: there is none."""
    return next((path for path in files if os.path.splitext(path)[1].lower() in _TABLES), None)
