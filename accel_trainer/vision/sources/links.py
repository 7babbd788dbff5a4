"""Finds the photos that are one file, through links of any kind or because rows name it twice.

Shapes: N samples of all splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import samefile

import numpy as np

from ...core.errors import DataError
from .class_names import Integers
from .photo_columns import Columns, ImageColumn


def first_rows(images: Sequence[ImageColumn]) -> Integers:
    """Return for each photo the first row that is the same file, int64 [N]: mostly its own.

    Rows are counted over all splits. Photos that are no files count as different.
    """
    rows = np.arange(sum(map(len, images)))
    inodes = [column.inodes for column in images if column.inodes is not None]
    if len(inodes) < len(images):
        return rows
    _, first, places = np.unique(np.concatenate(inodes), return_index=True, return_inverse=True)
    found = first[places]
    for row in np.flatnonzero(found != rows).tolist():  # two disks may use the same number
        if not samefile(_path_at(images, found[row]), _path_at(images, row)):
            found[row] = row
    return found


def refuse_two_classes(columns: Columns) -> None:
    """Raise DataError if one file is in two classes."""
    labels = np.concatenate([split.labels for split in columns.splits])
    first = first_rows(columns.images)
    is_same = labels[first] == labels
    wrong = np.flatnonzero(~(is_same if labels.ndim == 1 else is_same.all(1)))
    if len(wrong):
        both = " and ".join(_path_at(columns.images, each) for each in (first[wrong[0]], wrong[0]))
        fact = f"{both} are the same photo in two classes"
        raise DataError("DATA_LABEL", f"{fact}: remove one of them")


def notes_on_links(columns: Columns) -> list[str]:
    """Return a line if photos of the second split are, through links, also in the first."""
    train, val = columns.splits
    first = first_rows(columns.images)[len(train) :]
    (shared,) = np.nonzero(first < len(train))
    if not len(shared):
        return []
    rows = (shared[0] + len(train), first[shared[0]])
    both = " is ".join(_path_at(columns.images, row) for row in rows)
    fact = f"{len(shared):,} of {len(val):,} validation photos are also trained on, through links"
    return [f"{fact} ({both}): remove them, or the evaluation says little of new photos"]


def _path_at(images: Sequence[ImageColumn], row: int | np.int64) -> str:
    for column in images:
        if row < len(column):
            return column.path_at(int(row)) or ""
        row -= len(column)
    raise IndexError(row)
