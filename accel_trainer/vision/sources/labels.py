"""Reads the label columns of tables, and numbers the classes of all of them by name.

Tables are read each with its own types: the same number may stand for different classes in two.

Shapes: N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from ...core.wording import counted
from .class_names import check_class_names, merged_names, numbers_in, shown_names
from .label_columns import is_list


class Part(NamedTuple):
    """A `datasets.Dataset` that is a split or a part of it; `name` describes it in errors."""

    dataset: Any
    name: str


Split = Sequence[Part]
"""The tables of a split, in order."""


class _Labels(NamedTuple):
    """The labels of a table: `codes` are positions in `names`, and negative if there is no class.

    `kind` is what the column holds, and `rows` the row of each label.
    """

    kind: str
    names: tuple[str, ...]
    codes: NDArray[np.int64]
    rows: NDArray[np.int64]
    part: Part


def read_labels(
    splits: Sequence[Split], column: str
) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Return the names of the K classes, and the labels of each split, int64 [N] below K.

    Raises:
        DataError: a label is missing or has no class, photos have several labels, or the classes of
            the tables cannot be compared.
    """
    found = []
    for split in splits:
        parts = []
        for part in split:
            feature, values = _read_column(part, column, splits)
            if is_list(feature):
                fact = f"column {column} of {part.name} has several labels for each photo"
                fix = (
                    "choose a column with one label each with --label-column, or read it with "
                    "load_photos(multi_label=True)"
                )
                raise DataError("DATA_LABEL", f"{fact}: {fix}")
            parts.append(_labels_in(feature, values, np.arange(len(values)), column, part))
        found.append(parts)
    names = _classes_of([each for parts in found for each in parts], column, splits)
    return names, [np.concatenate([_numbered(each, names) for each in parts]) for parts in found]


def read_label_lists(
    splits: Sequence[Split], column: str
) -> tuple[tuple[str, ...], list[NDArray[np.float32]]]:
    """Return the names of the K classes, and the labels of each split, float32 [N, K].

    A label is 1 for each class of a photo, and 0 for the others.

    Raises:
        DataError: as `read_labels`, or the column has no lists.
    """
    found = []
    for split in splits:
        parts = []
        for part in split:
            feature, lists = _read_column(part, column, splits)
            if not is_list(feature):
                fact = f"column {column} of {part.name} has one label for each photo"
                raise DataError("DATA_LABEL", f"{fact}: leave out multi_label")
            lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
            rows = np.repeat(np.arange(len(lists)), lengths)
            parts.append(_labels_in(feature.feature, lists.flatten(), rows, column, part))
        found.append(parts)
    names = _classes_of([each for parts in found for each in parts], column, splits)
    targets = []
    for parts in found:
        of_parts = []
        for each in parts:
            target = np.zeros((len(each.part.dataset), len(names)), np.float32)
            target[each.rows, _numbered(each, names)] = 1
            of_parts.append(target)
        targets.append(np.concatenate(of_parts))
    return names, targets


def _read_column(part: Part, column: str, splits: Sequence[Split]) -> tuple[Any, Any]:
    """Return the type of a column, and its Arrow values.

    Raises DataError if there is no such column, or a row has no value.
    """
    dataset, name = part
    if column not in dataset.features:
        columns = ", ".join(dataset.features)
        fact = f"the splits of {splits[0][0].name} differ in column {column}"
        raise DataError(
            "DATA_COLUMNS", f"{fact}: write both with the same features ({name} has {columns})"
        )
    values = dataset.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        fact = (
            f"row {row} of {name} has no label in column {column} "
            f"({counted(values.null_count, 'such row')})"
        )
        raise DataError("DATA_LABEL", f"{fact}: add the label, or remove the row")
    return dataset.features[column], values


def _labels_in(
    feature: Any, values: Any, rows: NDArray[np.int64], column: str, part: Part
) -> _Labels:
    """Return the labels of a table, with the names that it gives them itself."""
    import pyarrow.types as types
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        names = tuple(map(str, feature.names))
        codes = np.array(values.to_numpy(zero_copy_only=False), np.int64)
        _refuse_outside(codes, len(names), codes, rows, part)
        return _Labels("class names", names, codes, rows, part)
    kinds = {
        "integers": types.is_integer,
        "booleans": types.is_boolean,
        "texts": lambda kind: types.is_string(kind) or types.is_large_string(kind),
    }
    kind = next((name for name, is_kind in kinds.items() if is_kind(values.type)), None)
    if kind is None:
        fact = f"column {column} of {part.name} is of type {values.type}"
        raise DataError("DATA_LABEL", f"{fact}: store its labels as integers or strings")
    encoded = values.dictionary_encode()
    found = encoded.dictionary.to_pylist()
    # An empty text is a missing label, as a negative integer is.
    is_class = {"integers": lambda value: value >= 0, "texts": lambda value: value.strip() != ""}
    in_order = sorted(filter(is_class.get(kind, lambda _: True), found))
    number_of = {value: number for number, value in enumerate(in_order)}
    numbers = np.array([number_of.get(value, -1) for value in found], np.int64)
    codes = numbers[encoded.indices.to_numpy()]
    given = np.array(found)[encoded.indices.to_numpy()] if found else codes
    _refuse_outside(codes, len(in_order), given, rows, part)
    return _Labels(kind, tuple(map(str, in_order)), codes, rows, part)


def _refuse_outside(
    codes: NDArray[np.int64],
    num_classes: int,
    given: NDArray[Any],
    rows: NDArray[np.int64],
    part: Part,
) -> None:
    wrong = np.flatnonzero((codes < 0) | (codes >= num_classes))
    if len(wrong):
        first = wrong[0]
        label = str(given[first]) or "''"
        such = counted(len(wrong), "such row")
        fact = f"row {rows[first]} of {part.name} has label {label} ({such})"
        fix = f"the classes are 0 to {num_classes - 1}: correct the label, or remove the row"
        raise DataError("DATA_LABEL", f"{fact}: {fix}")


def _classes_of(tables: Sequence[_Labels], column: str, splits: Sequence[Split]) -> tuple[str, ...]:
    """Return the names of all tables' classes: in the order of the lists, or else sorted.

    Raises DataError for integers, which count in one table, beside names in another.
    """
    by_kind = {each.kind: each for each in tables if len(each.names)}
    lists = [each.names for each in tables if each.kind == "class names"]
    if "integers" in by_kind and len(by_kind) > 1 and not _are_numbers(tables):
        integers = by_kind.pop("integers")
        other = next(iter(by_kind.values()))
        both = (
            f"{integers.part.name} has the integers {shown_names(integers.names)}, and "
            f"{other.part.name} the {other.kind} {shown_names(other.names)}"
        )
        fact = f"the splits of {splits[0][0].name} differ in column {column}"
        raise DataError("DATA_COLUMNS", f"{fact}: write both with the same features ({both})")
    others = merged_names(each.names for each in tables if each.kind != "class names")
    is_numeric = "integers" in by_kind
    ordered = sorted(others, key=int) if is_numeric else sorted(others)
    names = merged_names([*lists, ordered])
    check_class_names(names, f"column {column} of {splits[0][0].name}")
    return names


def _are_numbers(tables: Sequence[_Labels]) -> bool:
    """Return whether integers mean the same by position in all lists and as text."""
    for each in tables:
        if each.kind == "class names":
            is_same = list(each.names) == [str(number) for number in range(len(each.names))]
        else:
            is_same = all(name.isdecimal() and str(int(name)) == name for name in each.names)
        if not is_same:
            return False
    return True


def _numbered(labels: _Labels, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the labels as positions in `names`."""
    return numbers_in(names, labels.names)[labels.codes] if len(labels.codes) else labels.codes
