"""The image and the label column of a `datasets.Dataset`, found by type, and read without decoding.

Shapes: N samples, K classes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError, DataError
from ..data.photo_decode import read_photo

CHECKSUM = "image_sha256"
"""The column that `accel-trainer pack` adds: the hash of each photo's bytes, which is compared
whenever the photo is read."""


class ImageColumn:
    """The encoded images of a column.

    They are read from the memory-mapped Arrow file, or from the files whose paths it holds.
    """

    def __init__(self, dataset: Any, column: str, *, name: str, root: Path | None) -> None:
        import pyarrow as pa
        from datasets import Image

        try:
            columns = [column, CHECKSUM] if CHECKSUM in dataset.column_names else [column]
            selected = dataset.select_columns(columns)
            flat = selected.cast_column(column, Image(decode=False)).flatten()
        except (pa.ArrowException, ValueError, TypeError) as error:
            reason = next(iter(str(error).splitlines()), "")
            raise DataError(
                "DATA_COLUMNS", f"column {column} of {name} has no images ({reason}): name another"
            ) from error
        self.__setstate__((flat, name, f"{root}{os.sep}"))

    def __getstate__(self) -> tuple[Any, str, str]:
        # A copy of its Arrow tables would hold the bytes of all photos.
        return self._dataset, self._name, self._prefix

    def __setstate__(self, state: tuple[Any, str, str]) -> None:
        self._dataset, self._name, self._prefix = state
        # Indexing the dataset itself takes 22 us a row, and its slices copy the bytes of all
        # images.
        self._bytes = self._dataset.data.column(0)
        self._paths = self._dataset.data.column(1)
        indices = self._dataset._indices  # set by a selection, a shuffle or a filter
        self._rows = None if indices is None else indices.column(0).to_numpy()
        has_checksums = CHECKSUM in self._dataset.column_names
        self._checksums = self._dataset.data.column(CHECKSUM) if has_checksums else None

    def encoded_at(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises DataError if they are missing or differ from the packed ones.
        """
        row = self._row(index)
        encoded = self._bytes[row].as_py()
        if encoded is not None:
            checksum = None if self._checksums is None else self._checksums[row].as_py()
            if checksum not in (None, hashlib.sha256(encoded).hexdigest()):
                fact = f"{self.name_of(index)} is not what was packed: its sha256 differs"
                raise DataError(
                    "DATA_DAMAGED", f"{fact}: pack the data again, which replaces damaged files"
                )
            return bytes(encoded)
        path = self._paths[row].as_py()
        if path is None:
            raise DataError("DATA_IMAGE", f"{self.name_of(index)} has no image: remove the row")
        return read_photo(Path(path), path)

    def name_of(self, index: int) -> str:
        """Return the path of an image, if it has one, and its row."""
        path = self._paths[self._row(index)].as_py()
        row = f"row {index} of {self._name}"
        return row if path is None else f"{path} ({row})"

    def stored_name(self, index: int) -> str | None:
        """Return the path of an image, relative to the folder if it lies there; None: no path."""
        path = self._paths[self._row(index)].as_py()
        return None if path is None else str(path).removeprefix(self._prefix).replace(os.sep, "/")

    def name_hashes(self) -> NDArray[np.float64]:
        """Return a hash of each image as a number in 0..1, float64 [N].

        It is the hash of the image's path, relative to the folder, or else of its row.
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
        hashes[has_name] = hash_array(names.drop_null().to_numpy().astype(object), categorize=False)
        return np.asarray(hashes * 2.0**-64)

    def _row(self, index: int) -> int:
        return index if self._rows is None else int(self._rows[index])


class Columns(NamedTuple):
    """The images and labels of each split, the names of the K classes, and of both columns."""

    images: list[ImageColumn]
    labels: Sequence[NDArray[Any]]
    class_names: tuple[str, ...]
    names: tuple[str, str]


def read_columns(
    splits: Sequence[Any],
    names: Sequence[str],
    *,
    image_column: str | None,
    label_column: str | None,
    root: Path | None,
    multi_label: bool = False,
) -> Columns:
    """Return the images and labels of `splits`; `names` describe the splits in errors.

    The columns are found by type unless they are given.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no photos, or no labels.
    """
    image_column = find_image_column(splits[0], image_column, names[0])
    label_column = find_label_column(splits[0], label_column, names[0], multi_label=multi_label)
    read = read_label_lists if multi_label else read_labels
    class_names, labels = read(splits, label_column, names)
    images = [
        ImageColumn(split, image_column, name=name, root=root)
        for split, name in zip(splits, names, strict=True)
    ]
    return Columns(images, labels, class_names, (image_column, label_column))


def find_image_column(dataset: Any, wanted: str | None, name: str) -> str:
    """Return the column with images: `wanted`, or the only one whose type holds images."""
    from datasets import Image, Value

    def holds_bytes(feature: Any) -> bool:
        column = feature.get("bytes") if isinstance(feature, dict) else feature
        return column in (Value("binary"), Value("large_binary"))

    features = dataset.features
    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    candidates = typed or [column for column, feature in features.items() if holds_bytes(feature)]
    return _chosen(candidates, wanted, kind="image", name=name, columns=list(features))


def find_label_column(
    dataset: Any, wanted: str | None, name: str, *, multi_label: bool = False
) -> str:
    """Return the column with labels.

    It is `wanted`, or the only column of `ClassLabel`, or the only one of integers or strings. With
    `multi_label`, the values of columns are lists of these.
    """
    from datasets import ClassLabel, List, Value

    def is_label(feature: Any) -> bool:
        kind = feature.dtype if isinstance(feature, Value) else ""
        return kind in ("string", "large_string", "bool") or kind.startswith(("int", "uint"))

    features = dataset.features
    if multi_label:
        features = {
            column: feature.feature
            for column, feature in features.items()
            if isinstance(feature, List)
        }
    typed = [column for column, feature in features.items() if isinstance(feature, ClassLabel)]
    visible = {name: feature for name, feature in features.items() if not name.startswith("__")}
    others = [column for column, feature in visible.items() if is_label(feature)]
    return _chosen(typed or others, wanted, kind="label", name=name, columns=list(dataset.features))


def _chosen(
    candidates: list[str], wanted: str | None, *, kind: str, name: str, columns: list[str]
) -> str:
    flag = f"--{kind}-column"
    listed = ", ".join(columns)
    if wanted is not None:
        if wanted not in columns:
            raise ConfigError(
                "DATA_COLUMNS", f"{flag} {wanted}: {name} has columns {listed}, name one of these"
            )
        return wanted
    if kind in candidates:
        return kind
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        fact = f"columns {', '.join(candidates)} of {name} could each be the {kind}"
    elif columns:
        fact = f"{name} has columns {listed}, and none is of {kind}s"
    else:
        fact = f"{name} has no columns"
    raise DataError("DATA_COLUMNS", f"{fact}: name one with {flag}")


def read_labels(
    splits: Sequence[Any], column: str, names: Sequence[str]
) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Return the names of the K classes, and the labels of each split, int64 [N] below K.

    `names` describe the splits in errors.

    Raises:
        DataError: a label is missing or has no class, or photos have several labels.
    """
    feature, values = _read_column(splits, column, names)
    if _is_list(feature):
        fact = f"column {column} of {names[0]} has several labels for each photo"
        fix = (
            "name a column of single labels with --label-column, or read it with "
            "load_photos(multi_label=True)"
        )
        raise DataError("DATA_LABEL", f"{fact}: {fix}")
    rows = [np.arange(len(split)) for split in values]
    return _classes_of(feature, values, column, names, rows=rows)


def read_label_lists(
    splits: Sequence[Any], column: str, names: Sequence[str]
) -> tuple[tuple[str, ...], list[NDArray[np.float32]]]:
    """Return the names of the K classes, and the labels of each split, float32 [N, K].

    A label is 1 for each class of a photo, and 0 for the others.

    Raises:
        DataError: a list is missing or has a label without a class, or the column has no lists.
    """
    feature, lists = _read_column(splits, column, names)
    if not _is_list(feature):
        fact = f"column {column} of {names[0]} has one label for each photo"
        raise DataError("DATA_LABEL", f"{fact}: leave out multi_label")
    lengths = [split.value_lengths().to_numpy(zero_copy_only=False) for split in lists]
    rows = [np.repeat(np.arange(len(each)), each) for each in lengths]
    values = [split.flatten() for split in lists]
    class_names, labels = _classes_of(feature.feature, values, column, names, rows=rows)
    targets = [np.zeros((len(each), len(class_names)), np.float32) for each in lengths]
    for target, split_rows, split_labels in zip(targets, rows, labels, strict=True):
        target[split_rows, split_labels] = 1
    return class_names, targets


def _read_column(splits: Sequence[Any], column: str, names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return the type of a column, and its Arrow values in each split.

    Raises DataError if the splits differ in it, or a row has no value.
    """
    for split in splits:
        if column not in split.features or split.features[column] != splits[0].features[column]:
            fact = f"the splits of {names[0]} differ in column {column}"
            raise DataError("DATA_COLUMNS", f"{fact}: write both with the same features")
    values = [
        split.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()
        for split in splits
    ]
    for split, name in zip(values, names, strict=True):
        if split.null_count:
            row = int(np.flatnonzero(split.is_null().to_numpy(zero_copy_only=False))[0])
            count = f"({split.null_count} such rows)"
            fact = f"row {row} of {name} has no label in column {column} {count}"
            raise DataError("DATA_LABEL", f"{fact}: label or remove it")
    return splits[0].features[column], values


def _is_list(feature: Any) -> bool:
    from datasets import List

    return isinstance(feature, List | list)


def _classes_of(
    feature: Any,
    values: Sequence[Any],
    column: str,
    names: Sequence[str],
    *,
    rows: Sequence[NDArray[np.int64]],
) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Return the names of the K classes, and the class of each value, int64 below K.

    `values` and `rows` hold an array for each split: its labels, and the rows that they are from.
    """
    import pyarrow.types as types
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        class_names = tuple(str(class_name) for class_name in feature.names)
        labels = [np.array(split.to_numpy(zero_copy_only=False), np.int64) for split in values]
    elif types.is_floating(values[0].type) or types.is_nested(values[0].type):
        fact = f"column {column} of {names[0]} is of type {values[0].type}"
        raise DataError("DATA_LABEL", f"{fact}: make its labels integers or strings")
    else:
        class_names, labels = _numbered(values)
    for split, row_of, name in zip(labels, rows, names, strict=True):
        wrong = np.flatnonzero((split < 0) | (split >= len(class_names)))
        if len(wrong):
            first = wrong[0]
            count = f"({len(wrong)} such rows)"
            fact = f"row {row_of[first]} of {name} has label {split[first]} {count}"
            fix = f"the classes are 0 to {len(class_names) - 1}, fix or remove it"
            raise DataError("DATA_LABEL", f"{fact}: {fix}")
    return class_names, labels


def _numbered(values: Sequence[Any]) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Number the different integers or strings of all splits in sorted order.

    A negative integer means that there is no label, and stays as it is.
    """
    import pyarrow as pa

    encoded = pa.chunked_array(values).combine_chunks().dictionary_encode()
    found = encoded.dictionary.to_pylist()
    in_order = sorted(value for value in found if isinstance(value, str) or value >= 0)
    number_of = {value: number for number, value in enumerate(in_order)}
    numbers = np.array([number_of.get(value, value) for value in found], np.int64)
    labels = numbers[encoded.indices.to_numpy()]
    ends = np.cumsum([len(split) for split in values])
    return tuple(map(str, in_order)), np.split(labels, ends[:-1])
