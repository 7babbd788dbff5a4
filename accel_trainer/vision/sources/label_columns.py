"""Finds the columns of the images and of the labels: by their names first, then by their types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError, DataError, shortened

Features = Mapping[str, Any]
"""The types of a table's columns in `datasets`, by their names."""

_IMAGE_NAMES = ("image", "img", "photo", "picture")
FOLDER = "folder"
"""The label column that stands for the names of the photos' folders."""
_LABEL_NAMES = (
    "label",
    "labels",
    "class",
    "classes",
    "target",
    "targets",
    "category",
    "fine_label",
    "class_id",
    "class_label",
    "class_name",
    "label_id",
    "label_name",
)


def is_label_name(column: str) -> bool:
    """Return whether a column of this name is expected to hold labels."""
    return _plain(column) in _LABEL_NAMES


def find_image_column(features: Features, wanted: str | None, name: str) -> str:
    """Return the column with images: `wanted`, the one with a usual name, or the only one.

    `name` describes the table in errors.

    Raises:
        ConfigError: there is no column `wanted`.
        DataError: no column or several could be it, or the one with such a name has no images.
    """
    from datasets import Image

    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    usable = [column for column, feature in features.items() if _holds_bytes(feature)]
    found = _find(features, wanted, name, "image", _IMAGE_NAMES, typed=typed, usable=usable)
    if wanted is None and found not in (*typed, *usable):
        fact = f"column {found} of {name} is of type {_type_of(features[found])}"
        fix = "store the images in it, or choose a different column with --image-column"
        raise DataError("DATA_COLUMNS", f"{fact}, which cannot hold images: {fix}")
    return found


def find_label_column(
    features: Features, wanted: str | None, name: str, *, multi_label: bool = False
) -> str:
    """Return the column with labels: `wanted`, the one with a usual name, or the only one.

    Labels are a `ClassLabel`, integers, strings or booleans; with `multi_label`, lists of these.
    A column that is found by its name may have a different type. `name` describes the table in
    errors.

    Raises:
        ConfigError: there is no column `wanted`.
        DataError: no column or several could be it.
    """
    from datasets import ClassLabel

    inner = {
        column: feature.feature if multi_label else feature
        for column, feature in features.items()
        if is_list(feature) or not multi_label
    }
    typed = [column for column, feature in inner.items() if isinstance(feature, ClassLabel)]
    usable = [column for column, feature in inner.items() if _holds_labels(feature)]
    if wanted is None and not any(map(is_label_name, features)):
        _refuse_inner_labels(features, name)
        usable = [column for column in usable if not column.startswith("__")]
    return _find(features, wanted, name, "label", _LABEL_NAMES, typed=typed, usable=usable)


def refuse_unnamed_labels(features: Features, table: str, folders: Collection[str]) -> None:
    """Raise DataError if no column of a table of metadata is called like labels.

    Any of its columns may describe something else, and the classes may be the `folders` that the
    photos are in.
    """
    if any(map(is_label_name, features)):
        return
    _refuse_inner_labels(features, table)
    choices = [name for name, kind in features.items() if is_list(kind) or _holds_labels(kind)]
    fact = f"no column of {table} is called label"
    if len(folders) > 1:
        fact += f", and its photos are in folders ({shortened(sorted(folders))})"
        choices.insert(0, FOLDER)
    fix = " or ".join(f"--label-column {name}" for name in choices)
    raise DataError("DATA_COLUMNS", f"{fact}: set {fix}" if fix else f"{fact}: add one")


def refuse_unusable(column: str, feature: Any, name: str, *, multi_label: bool) -> None:
    """Raise DataError if a column has no labels that can be used; `name` describes its table."""
    kind = _type_of(feature)
    inner = feature.feature if is_list(feature) and multi_label else feature
    fix = "store the labels as integers or strings"
    if is_list(feature) and not multi_label:
        why = "each photo has several labels"
        fix = "read it with load_photos(multi_label=True)"
    elif multi_label and not is_list(feature):
        why = "each photo has one label"
        fix = "leave out multi_label"
    elif _holds_labels(inner):
        return
    elif kind.startswith("float"):
        why = "pandas writes floats if a label is missing"
    else:
        why = "its values cannot be classes"
    fact = f"column {column} of {name} is of type {kind} ({why})"
    raise DataError("DATA_COLUMNS", f"{fact}: {fix}, or choose a different one with --label-column")


def is_list(feature: Any) -> bool:
    """Return whether a column of this type has a list in each row."""
    from datasets import LargeList, List

    return isinstance(feature, List | LargeList | list)


def _plain(column: str) -> str:
    return column.strip().lower()


def _find(
    features: Features,
    wanted: str | None,
    name: str,
    kind: str,
    names: Sequence[str],
    *,
    typed: Sequence[str],
    usable: Sequence[str],
) -> str:
    """Return `wanted`, or else the column with one of `names`, or the only one that could be it.

    The first of `names` comes before the others. Of several others that could all be used, one that
    is the only one in `typed` comes first.
    """
    columns = ", ".join(features)
    if wanted is not None:
        if wanted not in features:
            fact = f"--{kind}-column {wanted}: {name} has columns {columns}"
            raise ConfigError("DATA_COLUMNS", f"{fact}: choose one of them")
        return wanted
    called = [column for column in features if _plain(column) in names]
    first = [column for column in called if _plain(column) == names[0]]
    best = [column for column in called if column in typed]
    if not first and len(best) == 1 and set(called) <= {*typed, *usable}:
        return best[0]
    candidates = first or called or typed or usable
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        fact = f"columns {', '.join(candidates)} of {name} could each hold the {kind}s"
    elif columns:
        fact = f"{name} has columns {columns}, none of which holds {kind}s"
    else:
        fact = f"{name} has no columns"
    raise DataError("DATA_COLUMNS", f"{fact}: choose one with --{kind}-column")


def _refuse_inner_labels(features: Features, name: str) -> None:
    """Raise DataError if a struct, or a list of them, has a field that is called like labels."""
    for column, feature in features.items():
        inside = [name for name in _fields_of(feature) if is_label_name(name)]
        if inside:
            fact = f"the labels of {name} seem to be nested in column {column} ({inside[0]})"
            raise DataError(
                "DATA_COLUMNS",
                f"{fact}: put them in a separate column, or choose one with --label-column",
            )


def _holds_bytes(feature: Any) -> bool:
    from datasets import Value

    column = feature.get("bytes") if isinstance(feature, dict) else feature
    return column in (Value("binary"), Value("large_binary"))


def _holds_labels(feature: Any) -> bool:
    from datasets import ClassLabel, Value

    kind = feature.dtype if isinstance(feature, ClassLabel | Value) else ""
    return kind in ("string", "large_string", "bool") or kind.startswith(("int", "uint"))


def _fields_of(feature: Any) -> Iterator[str]:
    """Yield the names of the fields in a column of structs, or of lists of structs."""
    if isinstance(feature, dict):
        yield from feature
        for each in feature.values():
            yield from _fields_of(each)
    elif is_list(feature):
        yield from _fields_of(feature[0] if isinstance(feature, list) else feature.feature)


def _type_of(feature: Any) -> str:
    if isinstance(feature, dict):
        return f"struct ({', '.join(feature)})"
    return str(getattr(feature, "dtype", type(feature).__name__))
