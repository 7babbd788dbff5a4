"""Reads parquet files, each with its own types.

`datasets` reads all files with the types of the first, or of the dataset's card: a number would
then mean a different class wherever the names are listed in a different order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...core.errors import DataError, reason_of
from .label_columns import Features
from .raw import Table


def have_same_types(files: Sequence[Path], of_card: Features | None) -> bool:
    """Return whether all parquet files have the same columns, and the classes of the card, if any.

    A card may name the classes of integers.
    """
    from datasets import ClassLabel

    types = [types_of(path) for path in files]
    named = [
        feature == of_card.get(column)
        for column, feature in types[0].items()
        if of_card is not None and isinstance(feature, ClassLabel)
    ]
    return all(each == types[0] for each in types) and all(named)


def types_of(path: Path) -> Any:
    """Return the features of a parquet file, as it describes them itself.

    Raises DataError if it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        return Features.from_arrow_schema(pq.read_schema(path))
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error of a parquet file that cannot be read."""
    fact = f"{path} cannot be read ({reason_of(error)})"
    return DataError("DATA_PARQUET", f"{fact}: download it again")


def read_by_types(files: Sequence[Path], load: Callable[[Sequence[Path]], Any]) -> list[Table]:
    """Return the tables of a split. `load` reads files in a row that have the same types."""
    groups = [list(group) for _, group in groupby(files, types_of)]
    return [Table(load(group), name_of_files(group)) for group in groups]


def name_of_files(files: Sequence[Path]) -> str:
    """Return the path of a file, or of several in a folder."""
    if len(files) == 1:
        return str(files[0])
    return f"{files[0].parent}/{{{','.join(path.name for path in files)}}}"
