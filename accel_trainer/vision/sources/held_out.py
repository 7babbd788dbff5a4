"""Chooses the photos to train and to evaluate on, and names what else may be meant for the latter.

Shapes: N samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ...core.errors import DataError, listed
from ...core.wording import counted
from .class_names import Integers
from .label_columns import is_label_name
from .layouts import (
    TABLES,
    is_held_out,
    is_of_training,
    looks_held_out,
    train_and_val_in,
)
from .links import first_rows
from .listing import BROKEN_LINK
from .photo_columns import Columns
from .raw import Opened, PhotoSplit, Split

T = TypeVar("T")

_STORED = (".parquet", ".tar", ".arrow", ".zip", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
_MAX_SPLITS = 10  # more values of a column are no splits
_FLAG_COLUMNS = (
    "is_valid is_val is_validation is_dev is_test is_eval is_train fold folds fold_id kfold cv_fold"
)


def train_and_val(data: Opened, name: str) -> tuple[Split, Split | None]:
    """Return the splits to train and to evaluate on; the second is None if there is only one.

    Raises DataError if none is there to train on: one that is called val or test alone is not.
    """
    train, val = train_and_val_in(data.splits)
    if train is None and len(data.splits) == 1 and not any(map(looks_held_out, data.splits)):
        (train,) = data.splits.values()
    if train is None:
        tables = [each.path for each in data.left_out if each.path.endswith(_STORED)]
        beside = f"; {listed(tables)} of none" if tables else ""
        splits = counted(len(data.splits), "split")
        fact = f"{name} has {splits} ({', '.join(data.splits)}{beside})"
        raise DataError("DATA_NO_TRAIN", f"{fact}: rename what to train on to train")
    return train, val


def may_be_held_out(data: Opened, train: Split) -> Iterator[str]:
    """Yield descriptions of what may be meant to be evaluated on, but is not read as a split.

    It is a folder or table beside, a class, another split, or a column of the training split.
    """
    for path, reason, _, is_folder in data.left_out:
        stem, suffix = os.path.splitext(path)
        is_set = is_folder or reason == BROKEN_LINK or suffix.lower() in (*TABLES, *_STORED)
        if is_set and looks_held_out(os.path.basename(stem)):
            yield f"{path} ({reason})"
    yield from (f"split {name}" for name in data.splits if looks_held_out(name))
    for dataset, name, _ in train:
        if not data.has_columns:
            names = dataset.features["label"].names
            yield from (f"class {each} of {name}" for each in names if is_held_out(each))
        for column in dataset.features:
            is_flag = column.lower() in _FLAG_COLUMNS.split()
            if is_flag or _may_name_splits(column, dataset.features[column]):
                values = sorted(map(str, dataset.unique(column)))
                if len(values) > 1 and (is_flag or _are_splits(values)):
                    yield f"column {column} of {name} ({listed(values)})"


def _may_name_splits(column: str, feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string") and not is_label_name(column)


def _are_splits(values: Sequence[str]) -> bool:
    """Return whether these are the names of one split to train on, and others."""
    if len(values) > _MAX_SPLITS:
        return False
    return any(map(is_of_training, values)) and any(map(looks_held_out, values))


def set_aside(columns: Columns, fraction: float) -> list[PhotoSplit]:
    """Return the photos of one split to train on, and those to evaluate on.

    A hash of its name decides on a photo; a file with several names is on one side.
    """
    is_val = columns.images[0].name_hashes() < fraction
    is_val = is_val[first_rows(columns.images)]
    return [_rows_of(columns.splits[0], np.flatnonzero(side)) for side in (~is_val, is_val)]


def _rows_of(split: PhotoSplit, rows: Integers) -> PhotoSplit:
    return PhotoSplit(
        labels=split.labels[rows],
        encoded_at=partial(_at_row, split.encoded_at, rows),
        name_of=partial(_at_row, split.name_of, rows),
    )


def _at_row(read: Callable[[int], T], rows: Integers, index: int) -> T:
    return read(int(rows[index]))
