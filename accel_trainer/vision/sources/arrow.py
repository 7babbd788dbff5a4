"""Reads small images in Arrow tables, from the Hugging Face hub or from parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ..data.decode import EncodedSplit, decode_on_demand
from .photo_columns import read_columns
from .photo_files import load_from_hub
from .photos import refuse_untrained
from .raw import RawImages


def read_hub(repository: str) -> RawImages:
    """Read a dataset from the hub, or from the Hugging Face cache if it was downloaded before."""
    splits = load_from_hub(repository)
    return _raw_images(
        [splits["train"], splits["test"]],
        names=(f"{repository} train", f"{repository} test"),
    )


def read_parquet(train: Sequence[Path], test: Sequence[Path]) -> RawImages:
    """Read the parquet files of both splits, in the order of the lists."""
    return _raw_images([_table(train), _table(test)], names=(_name(train), _name(test)))


def _name(files: Sequence[Path]) -> str:
    if len(files) == 1:
        return str(files[0])
    names = ",".join(path.name for path in files)
    return f"{files[0].parent}/{{{names}}}"


def _table(files: Sequence[Path]) -> Any:
    """Return the rows of all files as a `datasets.Dataset` in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset
    from datasets.table import InMemoryTable

    path = files[0]
    try:
        tables = []
        for path in files:
            tables.append(pq.read_table(path))
        return Dataset(InMemoryTable(pa.concat_tables(tables)))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            "DATA_PARQUET", f"{path} cannot be read ({reason}): download it again"
        ) from error


def _raw_images(splits: Sequence[Any], *, names: Sequence[str]) -> RawImages:
    """Return the images and labels of the training and the test split."""
    # CIFAR-100 has a column of coarse labels, too.
    fine = "fine_label" if "fine_label" in splits[0].features else None
    columns = read_columns(splits, names, image_column=None, label_column=fine, root=None)
    train, test = (
        EncodedSplit(labels=labels, encoded_at=images.encoded_at, name_of=images.name_of)
        for labels, images in zip(columns.labels, columns.images, strict=True)
    )
    if len(train.labels):
        refuse_untrained(train.labels, test.labels, columns.class_names, test.name_of)
    return decode_on_demand(train, test, class_names=columns.class_names)
