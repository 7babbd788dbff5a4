"""The image column of a split, read without decoding, and with it the labels.

Shapes: N samples, K classes.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError, reason_of
from ..data.photo_decode import read_photo
from .class_names import Names
from .label_columns import FOLDER, find_image_column, find_label_column
from .labels import read_labels
from .raw import Opened, PhotoSplit, Split

CHECKSUM = "image_sha256"
"""The column that `accel-trainer pack` adds: the hash of each photo's bytes, which is compared
whenever the photo is read."""


class ImageColumn:
    """The encoded images of a split.

    They are read from the memory-mapped Arrow files, or from the files whose paths these hold.
    """

    inodes: NDArray[np.uint64] | None = None

    def __init__(self, split: Split, column: str, *, root: Path | None) -> None:
        import pyarrow as pa
        from datasets import Image, concatenate_datasets

        has_checksums = all(CHECKSUM in table.dataset.column_names for table in split)
        columns = [column, CHECKSUM] if has_checksums else [column]
        flat = []
        for dataset, name, _ in split:
            try:
                selected = dataset.select_columns(columns)
                flat.append(selected.cast_column(column, Image(decode=False)).flatten())
            except (pa.ArrowException, ValueError, TypeError) as error:
                fact = f"column {column} of {name} has no images ({reason_of(error)})"
                raise DataError("DATA_COLUMNS", f"{fact}: choose a different column") from error
        whole = flat[0] if len(flat) == 1 else concatenate_datasets(flat)
        inodes = [table.inodes[column] for table in split if column in table.inodes]
        self.inodes = np.concatenate(inodes) if len(inodes) == len(split) else None
        ends = list(accumulate(len(table.dataset) for table in split))
        self.__setstate__((whole, [table.name for table in split], ends, f"{root}{os.sep}"))

    def __getstate__(self) -> tuple[Any, list[str], list[int], str]:
        # A copy of its Arrow tables would hold the bytes of all photos.
        return self._dataset, self._names, self._ends, self._prefix

    def __setstate__(self, state: tuple[Any, list[str], list[int], str]) -> None:
        self._dataset, self._names, self._ends, self._prefix = state
        # Indexing the dataset itself takes 22 us a row, and its slices copy the bytes of all
        # images.
        self._bytes = self._dataset.data.column(0)
        self._paths = self._dataset.data.column(1)
        indices = self._dataset._indices  # set by a selection, a shuffle or a filter
        self._rows = None if indices is None else indices.column(0).to_numpy()
        has_checksums = CHECKSUM in self._dataset.column_names
        self._checksums = self._dataset.data.column(CHECKSUM) if has_checksums else None

    def __len__(self) -> int:
        return self._ends[-1]

    def encoded_at(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises DataError if they are missing or differ from the packed ones.
        """
        row = self._row(index)
        encoded = self._bytes[row].as_py()
        if encoded is not None:
            checksum = None if self._checksums is None else self._checksums[row].as_py()
            if checksum not in (None, hashlib.sha256(encoded).hexdigest()):
                fact = f"{self.name_of(index)} has changed since it was packed: its sha256 differs"
                raise DataError(
                    "DATA_DAMAGED", f"{fact}: pack the data again, which replaces damaged files"
                )
            return bytes(encoded)
        path = self._paths[row].as_py()
        if path is None:
            raise DataError("DATA_IMAGE", f"{self.name_of(index)} has no image: remove the row")
        return read_photo(Path(path), path)

    def path_at(self, index: int) -> str | None:
        """Return the path of an image, if it has one."""
        path = self._paths[self._row(index)].as_py()
        return None if path is None else str(path)

    def name_of(self, index: int) -> str:
        """Return the path of an image, if it has one, and its row."""
        path = self.path_at(index)
        table = bisect_right(self._ends, index)
        start = self._ends[table - 1] if table else 0
        row = f"row {index - start} of {self._names[table]}"
        return row if path is None else f"{path} ({row})"

    def stored_name(self, index: int) -> str | None:
        """Return the path of an image, relative to the folder if it lies there; None: no path."""
        path = self.path_at(index)
        return None if path is None else path.removeprefix(self._prefix).replace(os.sep, "/")

    def name_hashes(self) -> NDArray[np.float64]:
        """Return a hash of each image as a number in 0..1, float64 [N].

        It is the hash of the image's path, relative to the folder; for images without one, or of
        the same, it is that of the row. Two rows may name one file.
        """
        import pyarrow.compute as pc
        from pandas.util import hash_array

        paths = self._paths if self._rows is None else self._paths.take(self._rows)
        below = pc.utf8_slice_codeunits(paths, start=len(self._prefix))
        names = pc.if_else(pc.starts_with(paths, self._prefix), below, paths)
        if os.sep != "/":
            names = pc.replace_substring(names, os.sep, "/")
        hashes = hash_array(np.arange(len(paths)))
        has_name = names.is_valid().to_numpy()
        of_names = hash_array(names.drop_null().to_numpy().astype(object), categorize=False)
        _, places, counts = np.unique(of_names, return_inverse=True, return_counts=True)
        is_file = self._bytes.is_null().to_numpy()
        is_file = (is_file if self._rows is None else is_file[self._rows])[has_name]
        tells = (counts[places] == 1) | is_file
        hashes[np.flatnonzero(has_name)[tells]] = of_names[tells]
        return np.asarray(hashes * 2.0**-64)

    def _row(self, index: int) -> int:
        return index if self._rows is None else int(self._rows[index])


class Columns(NamedTuple):
    """The photos of each split, the names of the K classes, and of both columns.

    `images` are the columns that the photos are read from.
    """

    splits: list[PhotoSplit]
    images: list[ImageColumn]
    class_names: Names
    names: tuple[str, str]


def read_columns(
    data: Opened,
    splits: Sequence[Split],
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    multi_label: bool = False,
) -> Columns:
    """Return the images and labels of `splits` of `data`; columns are found unless they are given.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no photos, or no labels.
    """
    features = splits[0][0].dataset.features
    name = splits[0][0].name
    image_column = find_image_column(features, image_column, name)
    if label_column == FOLDER and not data.has_columns:
        label_column = None  # the only one has their names
    label_column = find_label_column(features, label_column, name, multi_label=multi_label)
    class_names, labels = read_labels(splits, label_column, multi_label=multi_label)
    images = [ImageColumn(split, image_column, root=data.root) for split in splits]
    photos = [
        PhotoSplit(labels=each, encoded_at=column.encoded_at, name_of=column.name_of)
        for each, column in zip(labels, images, strict=True)
    ]
    return Columns(photos, images, class_names, (image_column, label_column))
