"""Reads `metadata.csv`, `.jsonl` and `.parquet`: the photos of a folder, and their labels.

The values of a CSV stay as they are written: `NA`, `null` and `001` are classes.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError, reason_of
from ...core.filesystem import read_file
from .label_columns import is_label_name
from .listing import LeftOut, Listing, images_at
from .raw import Table

_MAX_BYTES = 2**32
_NUM_BYTES_OF_UTF_16 = 64  # one of its first letters is ASCII
_FILE_NAME = "file_name"
_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
_DECIMAL = r"^-?[0-9]+\.[0-9]*$"


def read_metadata(listing: Listing, root: Path, name: str) -> tuple[list[Table], list[LeftOut]]:
    """Return the tables of a folder, each with its own types, and the photos that none lists.

    The column `file_name` becomes `image`, and `left_file_name` becomes `left`; both hold paths,
    which begin with `root`. `name` describes the tables in errors.

    Raises DataError if a table cannot be read, or names a file that is not there, or if two tables
    describe the same photo.
    """
    inodes = dict(zip(listing.photos, listing.inodes, strict=True))
    loaded = [_read_table(path, inodes, root) for path in listing.metadata]
    table_of: dict[str, Path] = {}
    for table_path, (_, found) in zip(listing.metadata, loaded, strict=True):
        for path in chain(*found.values()):
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
    tables = [
        Table(dataset, name, {column: _inodes(paths, inodes) for column, paths in found.items()})
        for dataset, found in loaded
    ]
    return tables, [*unlisted, *others]


def _inodes(paths: Sequence[str], known: Mapping[str, int]) -> NDArray[np.uint64]:
    return np.array([known.get(path) or os.stat(path).st_ino for path in paths], np.uint64)


def _read_table(path: Path, photos: Container[str], root: Path) -> tuple[Any, dict[str, list[str]]]:
    """Return a table, and the paths in each of its columns of photos; `photos` exist."""
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
    found = {}
    features = {}
    for place, name in enumerate(table.column_names):
        features[columns.get(name, name)] = Image(decode=False) if name in columns else types[name]
        if name in columns:
            paths = _paths(table, name, path, photos, root)
            found[columns[name]] = paths
            table = table.set_column(place, columns[name], images_at(paths))
    info = DatasetInfo(features=Features(features))
    return Dataset(InMemoryTable(table), info=info, fingerprint=path.name), found


def _read_text(path: Path) -> str:
    """Return a file of UTF-8. Raises ValueError for one of a different encoding."""
    data = read_file(path, max_bytes=_MAX_BYTES)
    if b"\0" in data[:_NUM_BYTES_OF_UTF_16]:
        raise ValueError("it is UTF-16, and not UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"it is not UTF-8, as byte {data[error.start]:#x} in line {line}"
        ) from None


def _read_csv(path: Path) -> Any:
    """Return a table of texts; a column of plain integers or decimals has these."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as arrow_csv

    text = _read_text(path)
    header = next(csv.reader(io.StringIO(text)), [])
    for name, separator in {";": ";", "tabs": "\t"}.items():
        others = next(csv.reader(io.StringIO(text), delimiter=separator), [])
        if _FILE_NAME in others and len(others) > len(header):
            raise ValueError(f"its columns are separated by {name}, and not by commas")
    if len(set(header)) != len(header):
        raise ValueError("two columns have the same name")
    table = arrow_csv.read_csv(
        io.BytesIO(text.encode()),
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

    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
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


def _paths(table: Any, column: str, path: Path, photos: Container[str], root: Path) -> list[str]:
    """Return the paths in a column, which begin with `root`.

    Raises DataError for one that cannot be used.
    """
    paths = []
    first_row: dict[str, int] = {}
    for row, name in enumerate(table.column(column).to_pylist()):
        where = f"row {row} of {path}"
        if not isinstance(name, str):
            raise DataError("DATA_METADATA", f"{where} has no {column}: add it, or remove the row")
        photo = os.path.normpath(os.path.join(path.parent, name))
        if photo not in photos and not os.path.isfile(photo):
            fact = f"{photo} does not exist, but {where} lists it"
            fix = "restore the file, or remove the row"
            if os.path.isfile(photo.replace("\\", os.sep)):
                fix = "write its folders with /"
            raise DataError("DATA_IMAGE", f"{fact}: {fix}")
        earlier = first_row.setdefault(photo, row)
        if earlier != row and table.slice(earlier, 1) != table.slice(row, 1):
            fact = f"rows {earlier} and {row} of {path} describe {name} differently"
            raise DataError("DATA_LABEL", f"{fact}: keep one of them")
        if not photo.startswith(f"{root}{os.sep}"):
            # Not an absolute path, by which other photos would be set aside on a different machine.
            photo = os.path.join(root, os.path.relpath(photo, root))
        paths.append(photo)
    return paths
