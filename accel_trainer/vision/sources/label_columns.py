"""Finds the columns of the images and of the labels: by their names first, then by their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError, DataError

_IMAGE_NAMES = ("image", "img", "photo", "picture")
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


def find_image_column(features: Mapping[str, Any], wanted: str | None, name: str) -> str:
    """Return the column with images: `wanted`, the one that is called so, or the only one.

    `name` describes the table in errors.

    Raises:
        ConfigError: there is no column `wanted`.
        DataError: no column or several could be it, or the one that is called so has no images.
    """
    from datasets import Image

    if wanted is not None:
        return _existing(wanted, features, name, flag="--image-column")
    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    usable = [column for column, feature in features.items() if _holds_bytes(feature)]
    if found := _named(features, _IMAGE_NAMES, typed, usable):
        named = _only(found, features, name, kind="image")
        if named not in (*typed, *usable):
            fact = f"column {named} of {name} is of type {_type_of(features[named])}"
            fix = "store the images in it, or choose a different column with --image-column"
            raise DataError("DATA_COLUMNS", f"{fact}, which cannot hold images: {fix}")
        return named
    return _only(typed or usable, features, name, kind="image")


def find_label_column(
    features: Mapping[str, Any], wanted: str | None, name: str, *, multi_label: bool = False
) -> str:
    """Return the column with labels: `wanted`, the one that is called so, or the only one.

    Labels are a `ClassLabel`, integers, strings or booleans; with `multi_label`, lists of these.
    `name` describes the table in errors.

    Raises:
        ConfigError: there is no column `wanted`.
        DataError: no column or several could be it, or the one that is called so has no labels.
    """
    from datasets import ClassLabel

    if wanted is not None:
        return _existing(wanted, features, name, flag="--label-column")
    inner = {
        column: feature.feature if multi_label else feature
        for column, feature in features.items()
        if is_list(feature) or not multi_label
    }
    typed = [column for column, feature in inner.items() if isinstance(feature, ClassLabel)]
    usable = [column for column, feature in inner.items() if _holds_labels(feature)]
    if found := _named(features, _LABEL_NAMES, typed, usable):
        named = _only(found, features, name, kind="label")
        if named not in (*typed, *usable):
            why, fix = _explain(features[named], multi_label=multi_label)
            fact = f"column {named} of {name} is of type {_type_of(features[named])} ({why})"
            raise DataError("DATA_COLUMNS", f"{fact}: {fix}, or choose another with --label-column")
        return named
    for column, feature in features.items():
        inside = [name for name in _fields_of(feature) if is_label_name(name)]
        if inside:
            fact = f"the labels of {name} seem to be nested in column {column} ({inside[0]})"
            raise DataError(
                "DATA_COLUMNS",
                f"{fact}: put them in a separate column, or choose one with --label-column",
            )
    visible = [column for column in usable if not column.startswith("__")]
    return _only(typed or visible, features, name, kind="label")


def is_list(feature: Any) -> bool:
    """Return whether a column of this type has a list in each row."""
    from datasets import LargeList, List

    return isinstance(feature, List | LargeList | list)


def _plain(column: str) -> str:
    return column.strip().lower()


def _existing(wanted: str, features: Mapping[str, Any], name: str, *, flag: str) -> str:
    if wanted not in features:
        columns = ", ".join(features)
        raise ConfigError(
            "DATA_COLUMNS", f"{flag} {wanted}: {name} has columns {columns}: choose one of them"
        )
    return wanted


def _named(
    features: Mapping[str, Any],
    names: tuple[str, ...],
    typed: Sequence[str],
    usable: Sequence[str],
) -> list[str]:
    """Return the columns that are called like one of `names`, of which the first counts alone.

    Of several others that could all be used, the only one in `typed` counts alone.
    """
    found = [column for column in features if _plain(column) in names]
    first = [column for column in found if _plain(column) == names[0]]
    best = [column for column in found if column in typed]
    if not first and len(best) == 1 and set(found) <= {*typed, *usable}:
        return best
    return first or found


def _only(candidates: list[str], features: Mapping[str, Any], name: str, *, kind: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    columns = ", ".join(features)
    if candidates:
        fact = f"columns {', '.join(candidates)} of {name} could each hold the {kind}s"
    elif columns:
        fact = f"{name} has columns {columns}, none of which holds {kind}s"
    else:
        fact = f"{name} has no columns"
    raise DataError("DATA_COLUMNS", f"{fact}: choose one with --{kind}-column")


def _holds_bytes(feature: Any) -> bool:
    from datasets import Value

    column = feature.get("bytes") if isinstance(feature, dict) else feature
    return column in (Value("binary"), Value("large_binary"))


def _holds_labels(feature: Any) -> bool:
    from datasets import ClassLabel, Value

    kind = feature.dtype if isinstance(feature, Value) else ""
    is_text = kind in ("string", "large_string", "string_view")
    return (
        isinstance(feature, ClassLabel)
        or is_text
        or kind == "bool"
        or kind.startswith(("int", "uint"))
    )


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


def _explain(feature: Any, *, multi_label: bool) -> tuple[str, str]:
    """Return why a column has no labels that can be used, and what to do about it."""
    kind = _type_of(feature)
    if is_list(feature) and not multi_label:
        return "each photo has several labels", "read it with load_photos(multi_label=True)"
    if multi_label and not is_list(feature):
        return "each photo has one label", "leave out multi_label"
    if kind.startswith("float"):
        why = "pandas writes floats if a label is missing"
        return why, "store the labels as integers or strings"
    if kind == "null":
        return "it is empty", "fill in the labels"
    return "its values cannot be classes", "store the labels as integers or strings"
