"""Reads `metadata.csv`, `.jsonl` and `.parquet`: the photos of a folder, and their labels.

The values of a CSV stay as they are written: `NA`, `null` and `001` are classes.
"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from ...core.errors import DataError, reason_of
from ...core.filesystem import read_file
from .label_columns import is_label_name
from .listing import LeftOut, Listing, images_at

_MAX_BYTES = 2**32
_FILE_NAME = "file_name"
_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
_DECIMAL = r"^-?[0-9]+\.[0-9]*$"


def read_metadata(listing: Listing) -> tuple[list[Any], list[LeftOut]]:
    """Return a `datasets.Dataset` for each table of a folder, and the photos that none lists.

    The column `file_name` becomes `image`, and `left_file_name` becomes `left`; both hold paths.

    Raises DataError if a table cannot be read, or names a file that is not there, or if two tables
    describe the same photo.
    """
    loaded = [_read_table(path, set(listing.photos)) for path in listing.metadata]
    table_of: dict[str, Path] = {}
    for table_path, (_, paths) in zip(listing.metadata, loaded, strict=True):
        for path in paths:
            other = table_of.setdefault(path, table_path)
            if other != table_path:
                fact = f"{other} and {table_path} both describe {path}"
                raise DataError("DATA_LABEL", f"{fact}: keep one of them")
    table = " or ".join(sorted({path.name for path in listing.metadata}))
    unlisted = [
        LeftOut(path, f"{table} does not list it", is_loss=True)
        for path in listing.photos
        if path not in table_of
    ]
    others = [each for each in listing.left_out if each.path not in table_of]
    return [dataset for dataset, _ in loaded], [*unlisted, *others]


def _read_table(path: Path, photos: set[str]) -> tuple[Any, set[str]]:
    """Return a table, and the paths of the files that it names; `photos` are known to exist."""
    from datasets import Dataset, DatasetInfo, Features, Image
    from datasets.table import InMemoryTable

    num_bytes = path.stat().st_size
    if num_bytes > _MAX_BYTES:  # a file may claim any size
        fact = f"{path} is {num_bytes:,} bytes, more than the limit of {_MAX_BYTES:,}"
        raise DataError("DATA_METADATA", f"{fact}: write the data as parquet")
    try:
        table = _READERS[path.suffix](path)
        types = Features.from_arrow_schema(table.schema)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:
        fact = f"{path} cannot be read ({reason_of(error)})"
        raise DataError("DATA_METADATA", f"{fact}: repair it") from error
    columns = {
        name: name.removesuffix(_FILE_NAME).removesuffix("_") or "image"
        for name in table.column_names
        if name == _FILE_NAME or name.endswith(f"_{_FILE_NAME}")
    }
    if not columns:
        fact = f"{path} has columns {', '.join(table.column_names)}, but no `{_FILE_NAME}`"
        raise DataError("DATA_METADATA", f"{fact}: rename the column with the photos' file names")
    named = set[str]()
    features = {}
    for place, name in enumerate(table.column_names):
        features[columns.get(name, name)] = Image(decode=False) if name in columns else types[name]
        if name in columns:
            paths = _paths(table, name, path, photos)
            named.update(paths)
            table = table.set_column(place, columns[name], images_at(paths))
    info = DatasetInfo(features=Features(features))
    return Dataset(InMemoryTable(table), info=info, fingerprint=path.name), named


def _read_csv(path: Path) -> Any:
    """Return a table of texts; a column of plain integers or decimals has these."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as arrow_csv

    with path.open(newline="", encoding="utf-8-sig") as file:
        header = next(csv.reader(file), [])
    if len(set(header)) != len(header):
        raise ValueError("two columns have the same name")
    table = arrow_csv.read_csv(
        path,
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    # Such an integer is printed as it was written; a decimal may not be (1.50), so it is no label.
    for name in header:
        texts = table.column(name)
        for pattern, kind in ((_INTEGER, pa.int64()), (_DECIMAL, pa.float64())):
            is_number = pc.all(pc.match_substring_regex(texts, pattern)).as_py()
            if is_number and not (kind == pa.float64() and is_label_name(name)):
                table = table.set_column(header.index(name), name, texts.cast(kind))
    return table


def _read_json_lines(path: Path) -> Any:
    import pyarrow as pa

    text = read_file(path, max_bytes=_MAX_BYTES).decode("utf-8-sig")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path)


_READERS = {".csv": _read_csv, ".jsonl": _read_json_lines, ".parquet": _read_parquet}


def _paths(table: Any, column: str, path: Path, photos: set[str]) -> list[str]:
    """Return the paths in a column. Raises DataError for one that cannot be used."""
    paths = []
    first_row: dict[str, int] = {}
    for row, name in enumerate(table.column(column).to_pylist()):
        where = f"row {row} of {path}"
        if not isinstance(name, str):
            raise DataError("DATA_METADATA", f"{where} has no {column}: add it, or remove the row")
        photo = os.path.normpath(os.path.join(path.parent, name))
        if photo not in photos and not os.path.isfile(photo):
            fact = f"{photo} does not exist, but {where} lists it"
            raise DataError("DATA_IMAGE", f"{fact}: restore the file, or remove the row")
        earlier = first_row.setdefault(photo, row)
        if earlier != row and table.slice(earlier, 1) != table.slice(row, 1):
            fact = f"rows {earlier} and {row} of {path} describe {name} differently"
            raise DataError("DATA_LABEL", f"{fact}: keep one of them")
        paths.append(photo)
    return paths
