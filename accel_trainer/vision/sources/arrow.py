"""Reads small images in the tables of `datasets`: from the hub, or from parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.decode import decode_on_demand
from .held_out import train_and_val
from .photo_columns import read_columns
from .photo_files import load_from_hub
from .photos import refuse_untrained
from .raw import Opened, RawImages, Split, Table
from .tables import reading_parquet


def read_hub(repository: str, revision: str) -> RawImages:
    """Read a dataset from the hub, or from the Hugging Face cache if it was downloaded before."""
    instead = "--dataset digits, which needs no network"
    splits = load_from_hub(repository, revision=revision, instead=instead)
    named = {name: [Table(table, f"{repository} {name}")] for name, table in splits.items()}
    data = Opened(splits=named)
    train, val = train_and_val(data, repository)
    return _raw_images(data, train, val or [])


def read_parquet(train: Sequence[Path], test: Sequence[Path]) -> RawImages:
    """Read the parquet files of both splits, in the order of the lists."""
    splits = {name: [*map(_table, files)] for name, files in (("train", train), ("test", test))}
    return _raw_images(Opened(splits=splits), *splits.values())


def _table(path: Path) -> Table:
    """Return the rows of a file as a `datasets.Dataset` in memory, with the types of this file."""
    import pyarrow.parquet as pq
    from datasets import Dataset
    from datasets.table import InMemoryTable

    with reading_parquet(path):
        return Table(Dataset(InMemoryTable(pq.read_table(path))), str(path))


def _raw_images(data: Opened, train: Split, test: Split) -> RawImages:
    """Return the images and labels of the training and the test split."""
    columns = read_columns(data, [train, test])
    if len(columns.splits[0]):
        refuse_untrained(columns.splits, columns.class_names)
    return decode_on_demand(*columns.splits, class_names=columns.class_names)
