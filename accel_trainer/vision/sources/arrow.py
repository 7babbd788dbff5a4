"""Reads images in Arrow tables, from the Hugging Face hub or from parquet files.

Shapes: N samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from ..data.decode import EncodedSplit, decoded
from .raw import RawImages

if TYPE_CHECKING:
    import pyarrow as pa

_IMAGE_COLUMNS, _LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
_PROBE_TIMEOUT_S = 5


def read_hub(repository: str) -> RawImages:
    """Read a dataset from the hub, or from the Hugging Face cache if it was downloaded before."""
    if error := probe_hub(repository):
        raise _unreachable(repository, error) from error
    from datasets import load_dataset

    try:
        splits = load_dataset(repository)
    except (OSError, ValueError) as error:
        raise _unreachable(repository, error) from error
    tables = {name: splits[name].with_format("arrow")[:] for name in ("train", "test")}
    return _raw_images(tables["train"], tables["test"], names=(f"{repository} train", f"{repository} test"))


def probe_hub(repository: str) -> Exception | None:
    """Return why the hub does not answer, or has no such dataset. None: it has, or it is not asked (offline)."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        # `load_dataset` retries for 24 s (datasets 5.2), so check first whether the hub answers.
        try:
            HfApi().dataset_info(repository, timeout=_PROBE_TIMEOUT_S)
        except Exception as error:  # network errors depend on its HTTP library
            return error
    return None


def _unreachable(repository: str, error: Exception) -> DataError:
    from huggingface_hub import constants

    reason = (str(error).splitlines() or [type(error).__name__])[0]
    hint = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "set HF_HUB_OFFLINE=1 if it was downloaded before"
    return DataError(
        "DATA_HUB",
        f"cannot get {repository} from the Hugging Face hub ({reason}): give a local folder with "
        f"--dataset FOLDER, use --dataset digits, which needs no download, or {hint}",
    )


def read_parquet(train: Sequence[Path], test: Sequence[Path]) -> RawImages:
    """Read parquet files, each list in order, with a column `img` or `image` and `label` or `fine_label`."""
    return _raw_images(_table(train), _table(test), names=(_name(train), _name(test)))


def _name(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0].parent}/{{{','.join(path.name for path in files)}}}"


def _table(files: Sequence[Path]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in files:
        try:
            tables.append(pq.read_table(path))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise DataError("DATA_PARQUET", f"{path} cannot be read ({reason}): download it again") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError("DATA_PARQUET", f"{_name(files)} have different columns: download them again") from error


def _raw_images(train: pa.Table, test: pa.Table, *, names: tuple[str, str]) -> RawImages:
    class_names = _class_names(train.schema, _column(train, _LABEL_COLUMNS, names[0]))
    return decoded(_split(train, names[0]), _split(test, names[1]), class_names=class_names)


def _column(table: pa.Table, candidates: tuple[str, ...], name: str) -> str:
    for column in candidates:
        if column in table.column_names:
            return column
    raise DataError(
        "DATA_COLUMNS",
        f"{name} has columns {', '.join(table.column_names)}: rename one to {' or '.join(candidates)}",
    )


def _class_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Return the class names from the schema's metadata, if the `datasets` library wrote them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"]) or None
    except (KeyError, TypeError, ValueError):
        return None


def _split(table: pa.Table, name: str) -> EncodedSplit:
    import pyarrow as pa
    import pyarrow.compute as pc

    images: Any = table.column(_column(table, _IMAGE_COLUMNS, name))
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    labels = _labels(table.column(_column(table, _LABEL_COLUMNS, name)), name)

    def name_of(index: int) -> str:
        return f"row {index} of {name}"

    def encoded_at(index: int) -> bytes:
        encoded = images[index].as_py()
        if not isinstance(encoded, bytes):
            raise DataError("DATA_IMAGE", f"{name_of(index)} has no image bytes: remove the row")
        return encoded

    return EncodedSplit(labels=labels, encoded_at=encoded_at, name_of=name_of)


def _labels(column: pa.ChunkedArray, name: str) -> NDArray[np.int64]:
    """Return the labels, int64 [N]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_integer(column.type):
        raise DataError("DATA_LABEL", f"{name} has labels of type {column.type}: make them integers from 0 on")
    missing = np.flatnonzero(pc.is_null(column).to_numpy())
    if len(missing):
        raise DataError(
            "DATA_LABEL",
            f"row {missing[0]} of {name} has no label ({len(missing)} such rows): label or remove it",
        )
    return np.asarray(column.to_numpy(), dtype=np.int64)
