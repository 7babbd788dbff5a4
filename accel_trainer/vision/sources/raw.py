"""The common forms of all sources: tables, encoded photos, decoded images; and their checks.

Shapes: N samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from ..data.photo_decode import Pixels
from .class_names import Integers, Names
from .listing import LeftOut


class Table(NamedTuple):
    """A `datasets.Dataset` that is a split or belongs to one; `name` describes it in errors.

    `inodes` has those of the photos in each column of files, uint64 [N].
    """

    dataset: Any
    name: str
    inodes: Mapping[str, NDArray[np.uint64]] = MappingProxyType({})


Split = Sequence[Table]
"""The tables of a split, in order."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The splits of a source by name, and what is left out of it.

    `facts` are lines that a run prints. `has_columns` is false if the labels are the names of
    folders, and `root` is the folder of a source on this machine.
    """

    splits: Mapping[str, Split]
    left_out: Sequence[LeftOut] = ()
    facts: Sequence[str] = ()
    has_columns: bool = True
    root: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PhotoSplit:
    """The labels and the encoded photos of a split.

    Labels are int64 [N] below K; if photos have several labels, float32 [N, K] of 0 and 1.
    `encoded_at(index)` reads a file as bytes, from any thread; `name_of(index)` describes where it
    is, for messages.
    """

    labels: NDArray[Any]
    encoded_at: Callable[[int], bytes]
    name_of: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class RawSplit:
    """The samples of a source: labels [N], and images uint8 [H, W, C], decoded one at a time.

    `name_of(index)` describes where a sample is, for messages: a path, or a row of a file.
    """

    labels: Integers
    image_at: Callable[[int], Pixels]
    name_of: Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class RawImages:
    """A dataset before decoding. `class_names` is None if the source does not name its classes."""

    train: RawSplit
    test: RawSplit
    class_names: Names | None


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Where a dataset comes from. `key` changes with the data and costs less than `read`.

    A run warns of the `notes`, and prints the `facts`.
    """

    name: str
    key: str
    read: Callable[[], RawImages]
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


def checked_class_names(raw: RawImages) -> Names:
    """Return the class names (numbers if the source has none), after checking all labels.

    Raises:
        DataError: a split is empty, or a label has no class.
    """
    for split_name, split in (("train", raw.train), ("test", raw.test)):
        if len(split.labels) == 0:
            raise DataError(
                "DATA_EMPTY",
                f"the {split_name} split has no images: give a dataset that has both splits",
            )
    names = raw.class_names or tuple(str(label) for label in range(int(raw.train.labels.max()) + 1))
    for split in (raw.train, raw.test):
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= len(names)))
        if len(wrong):
            index = int(wrong[0])
            raise DataError(
                "DATA_LABEL",
                f"{split.name_of(index)} has label {split.labels[index]}, the classes are 0 to "
                f"{len(names) - 1} ({len(wrong)} such labels): fix the labels",
            )
    return names
