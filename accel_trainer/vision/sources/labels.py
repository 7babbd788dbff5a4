"""Reads the label columns of tables, and numbers the classes of all of them by name.

Each table is read with its own types: a number may stand for different classes in two of them.

Shapes: N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError, shortened
from ...core.wording import counted
from .class_names import Integers, Names, check_class_names, merged_names, numbers_in
from .label_columns import refuse_unusable
from .raw import Split, Table


class _Labels(NamedTuple):
    """The labels of a table: `codes` are positions in `names`, and negative if there is no class.

    `kind` is what the column holds, and `rows` the row of each label.
    """

    kind: str
    names: Names
    codes: Integers
    rows: Integers
    table: Table


def read_labels(
    splits: Sequence[Split], column: str, *, multi_label: bool = False
) -> tuple[Names, list[NDArray[Any]]]:
    """Return the names of the K classes, and the labels of each split, int64 [N] below K.

    With `multi_label` they are float32 [N, K]: 1 for each class in a photo's list, and 0 for the
    others.

    Raises:
        DataError: a label is missing or has no class, photos have several labels or none has a
            list, or the classes of the tables cannot be compared.
    """
    found = [
        [_read_column(table, column, splits, multi_label=multi_label) for table in split]
        for split in splits
    ]
    names = _classes_of([each for tables in found for each in tables], column, splits)
    numbered = _as_rows if multi_label else _as_numbers
    return names, [np.concatenate([numbered(each, names) for each in tables]) for tables in found]


def _read_column(
    table: Table, column: str, splits: Sequence[Split], *, multi_label: bool
) -> _Labels:
    """Return the labels of a table. Raises DataError if there is no such column, or no labels."""
    dataset, name, _ = table
    if column not in dataset.features:
        columns = ", ".join(dataset.features)
        fact = f"the splits of {splits[0][0].name} differ in column {column}"
        raise DataError(
            "DATA_COLUMNS", f"{fact}: write both with the same features ({name} has {columns})"
        )
    feature = dataset.features[column]
    refuse_unusable(column, feature, name, multi_label=multi_label)
    values = dataset.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()
    rows = np.arange(len(values))
    _refuse_missing(values, rows, column, name)
    if multi_label:
        feature = feature.feature
        rows = rows.repeat(values.value_lengths().to_numpy(zero_copy_only=False))
        values = values.flatten()
        _refuse_missing(values, rows, column, name)
    return _labels_in(feature, values, rows, table)


def _refuse_missing(values: Any, rows: Integers, column: str, name: str) -> None:
    if values.null_count:
        row = rows[values.is_null().to_numpy(zero_copy_only=False)][0]
        fact = (
            f"row {row} of {name} has no label in column {column} "
            f"({counted(values.null_count, 'such row')})"
        )
        raise DataError("DATA_LABEL", f"{fact}: add the label, or remove the row")


def _labels_in(feature: Any, values: Any, rows: Integers, table: Table) -> _Labels:
    """Return the labels of a table, with the names that it gives them itself."""
    import pyarrow.types as types
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        kind = "class names"
        names = tuple(map(str, feature.names))
        codes = np.array(values.to_numpy(zero_copy_only=False), np.int64)
    else:
        is_numeric = types.is_integer(values.type)
        kind = (
            "booleans" if types.is_boolean(values.type) else "integers" if is_numeric else "texts"
        )
        encoded = values.dictionary_encode()
        found = encoded.dictionary.to_pylist()
        # An empty text is a missing label, as a negative integer is.
        in_order = sorted(
            each for each in found if (each.strip() if kind == "texts" else each >= 0)
        )
        names = tuple(map(str, in_order))
        codes = numbers_in(in_order, found)[encoded.indices.to_numpy()]
    wrong = np.flatnonzero((codes < 0) | (codes >= len(names)))
    if len(wrong):
        first = int(wrong[0])
        label = str(values[first]).strip() or "''"
        such = counted(len(wrong), "such row")
        fact = f"row {rows[first]} of {table.name} has label {label} ({such})"
        if kind == "class names":
            fact += f": the classes are 0 to {len(names) - 1}"
        raise DataError("DATA_LABEL", f"{fact}: correct the label, or remove the row")
    return _Labels(kind, names, codes, rows, table)


def _classes_of(tables: Sequence[_Labels], column: str, splits: Sequence[Split]) -> Names:
    """Return the names of all tables' classes: in the order of the lists, or else sorted.

    Raises DataError for integers, which count in one table, beside names in another.
    """
    by_kind = {each.kind: each for each in tables if len(each.names)}
    lists = [each.names for each in tables if each.kind == "class names"]
    if "integers" in by_kind and len(by_kind) > 1 and not _are_numbers(tables):
        integers = by_kind.pop("integers")
        other = next(iter(by_kind.values()))
        both = (
            f"{integers.table.name} has the integers {shortened(integers.names)}, and "
            f"{other.table.name} the {other.kind} {shortened(other.names)}"
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


def _as_numbers(labels: _Labels, names: Sequence[str]) -> NDArray[Any]:
    """Return the labels as positions in `names`, int64."""
    return numbers_in(names, labels.names)[labels.codes] if len(labels.codes) else labels.codes


def _as_rows(labels: _Labels, names: Sequence[str]) -> NDArray[Any]:
    """Return a row of float32 [K] for each photo: 1 for its classes, and 0 for the others."""
    rows = np.zeros((len(labels.table.dataset), len(names)), np.float32)
    rows[labels.rows, _as_numbers(labels, names)] = 1
    return rows
