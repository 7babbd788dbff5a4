"""Reads tables through HuggingFace `datasets`: parquet files, tars, and what `save_to_disk` wrote.

Nothing in these files is expanded, followed elsewhere, or run; a dataset's card is not read. Each
parquet file has its own types: with those of the first, a number would mean a different class
wherever the names are listed in a different order.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ...core.errors import DataError, reason_of, shortened
from ...core.filesystem import read_file
from .layouts import EXPECTED, files_of_splits, refuse_unclear_tables
from .listing import METADATA, LeftOut, reason_to_skip, subfolders
from .raw import Opened, Split, Table
from .stamps import cache_of
from .tar_files import check_samples, index_tar

READERS = {".parquet": "parquet", ".tar": "webdataset"}
"""The suffixes of tables, and the names of their readers in `datasets`."""

_MAX_CARD_BYTES = 2**16
_MAX_DESCRIPTION_BYTES = 2**24
_SAVE_AGAIN = "write the data again with save_to_disk"
_DECODED_MEMBERS = ("cls", "cls2", "index", "inx", "id", "json", "jsn")
_TEXT_MEMBERS = ("txt", "text", "transcript")


def opened(dataset: Any, name: str) -> Opened:
    """Return a `Dataset` or a `DatasetDict` as its splits; `name` describes them in errors.

    Raises DataError for data that cannot be indexed.
    """
    from datasets import Dataset

    splits = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    for split in splits.values():
        if not isinstance(split, Dataset):
            fact = f"{name} is a {type(split).__name__}"
            raise DataError(
                "DATA_TYPE", f"{fact}: give a map-style datasets.Dataset, which can be indexed"
            )
    return Opened(splits={str(key): [Table(table, name)] for key, table in splits.items()})


def has_tables(root: Path) -> bool:
    """Return whether there are parquet files or tars in the folder or in one of its folders."""
    return any(
        name.endswith(tuple(READERS)) and name not in METADATA
        for folder in (root, *subfolders(root))
        for _, _, files in islice(os.walk(folder), 1)
        for name in files
    )


def is_saved(root: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote the folder."""
    return (root / "dataset_dict.json").is_file() or (root / "state.json").is_file()


def read_saved(root: Path, name: str) -> Opened:
    """Return what `save_to_disk` wrote; `name` describes it in errors.

    Raises DataError if a file is damaged, or names one that does not lie beside it.
    """
    folders = {"train": root}
    if (root / "dataset_dict.json").is_file():
        folders = {path.name: path for path in _named_in(root / "dataset_dict.json", "splits")}
    splits = dict[str, Split]()
    read = set[str]()
    for split, folder in folders.items():
        files = _named_in(folder / "state.json", "_data_files")
        splits[split] = [Table(_open_saved(folder, files), name)]
        read.update(map(str, files))
    return Opened(splits=splits, left_out=unread_data(root, read))


def _named_in(description: Path, key: str) -> list[Path]:
    """Return the files or folders that one of the JSON files of `save_to_disk` names."""
    named = _described(
        description,
        lambda content: [
            each["filename"] if isinstance(each, dict) else each for each in content[key]
        ],
    )
    paths = []
    for name in map(str, named):
        place = description.parent / name
        is_special = place.exists() and not (place.is_file() or place.is_dir())
        if not name or name != os.path.basename(name) or is_special:
            fact = f"{description} refers to {name!r}, which is not a file beside it"
            raise DataError("DATA_OUTSIDE", f"{fact}: {_SAVE_AGAIN}")
        paths.append(place)
    return paths


def _described(path: Path, parse: Callable[[Any], Any]) -> Any:
    """Return what `parse` makes of the content of a JSON file of `save_to_disk`."""
    try:
        return parse(json.loads(read_file(path.resolve(), max_bytes=_MAX_DESCRIPTION_BYTES)))
    except Exception as error:  # of any type: it may be a pipe, or say anything
        fact = f"{path} cannot be read ({type(error).__name__}: {reason_of(error)})"
        raise DataError("DATA_DAMAGED", f"{fact}: {_SAVE_AGAIN}") from error


def _open_saved(folder: Path, files: Sequence[Path]) -> Any:
    """Return the rows of Arrow files in a folder, with the types that its description has."""
    from datasets import Dataset, DatasetInfo
    from datasets.table import MemoryMappedTable, concat_tables

    info = _described(folder / "dataset_info.json", DatasetInfo.from_dict)
    tables = []
    for path in files:
        try:
            tables.append(MemoryMappedTable.from_file(str(path)))
        except Exception as error:  # its readers raise errors of any type
            fact = f"{path} is damaged ({reason_of(error)})"
            raise DataError("DATA_DAMAGED", f"{fact}: restore it, or write it again") from error
    if not tables:
        raise DataError("DATA_DAMAGED", f"{folder / 'state.json'} names no file: {_SAVE_AGAIN}")
    # Without a given fingerprint, `Dataset` hashes all tables, which takes seconds for hundreds.
    return Dataset(concat_tables(tables), info=info, fingerprint=folder.name)


def read_table(path: Path, cache_dir: Path | None) -> Opened:
    """Return one parquet file or tar as the split `train`."""
    return _read_splits({"train": [path]}, cache_dir)


def read_tables(root: Path, cache_dir: Path | None) -> Opened:
    """Return the splits of the parquet files or tars below a folder, found by their names."""
    found = (path for path in root.rglob("*") if _is_table(path.relative_to(root)))
    files = sorted(filter(Path.is_file, found))
    splits = files_of_splits(root, files) or {"train": files}
    if len({path.suffix for path in files}) > 1:
        fact = f"{root} mixes parquet files and tars"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: move one kind to a different folder")
    refuse_unclear_tables(root, splits)
    data = _read_splits(splits, cache_dir)
    read = {str(path) for paths in splits.values() for path in paths}
    cards = [
        LeftOut(str(card), "not read: files name their splits, and tables their classes")
        for card in (root / "README.md", root / ".huggingface.yaml")
        if _describes_data(card)
    ]
    return replace(data, left_out=[*data.left_out, *unread_data(root, read), *cards])


def _describes_data(card: Path) -> bool:
    """Return whether a dataset's card lists files or classes, as it may on the hub."""
    head = b""
    if card.is_file():
        with suppress(OSError), open(card, "rb") as file:
            head = file.read(_MAX_CARD_BYTES)
    return b"configs:" in head or b"class_label:" in head


def _is_table(path: Path) -> bool:
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return path.suffix in READERS and path.name not in METADATA and not is_hidden


def _read_splits(splits: Mapping[str, Sequence[Path]], cache_dir: Path | None) -> Opened:
    tars = [index_tar(path) for paths in splits.values() for path in paths if path.suffix == ".tar"]
    for tar in tars:
        check_samples(tar)
    tables = {
        split: [
            Table(_load_files(group, cache_dir), _name_of(group))
            for _, types in groupby(paths, types_of)
            for group in [list(types)]
        ]
        for split, paths in splits.items()
    }
    return Opened(splits=tables, left_out=[each for tar in tars for each in tar.left_out])


def types_of(path: Path) -> Any:
    """Return the features of a parquet file, as it describes them itself; None for a tar.

    Raises DataError if it cannot be read.
    """
    import pyarrow.parquet as pq
    from datasets import Features

    if path.suffix == ".tar":
        return None
    with reading_parquet(path):
        return Features.from_arrow_schema(pq.read_schema(path))


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Raise DataError if the block cannot read a parquet file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        fact = f"{path} cannot be read ({reason_of(error)})"
        raise DataError("DATA_PARQUET", f"{fact}: download it again") from error


def _name_of(files: Sequence[Path]) -> str:
    """Return the path of a file, or of the first of several."""
    if len(files) == 1:
        return str(files[0])
    return f"{files[0].parent}/{{{shortened([path.name for path in files], separator=',')}}}"


def unread_data(root: Path, read: Collection[str]) -> list[LeftOut]:
    """Return the tables and photos below a folder that are not in `read`."""
    return [
        LeftOut(path, "not a table of any split", is_loss=True)
        for path in sorted(map(str, root.rglob("*")))
        if path not in read
        and (path.endswith((*READERS, ".arrow")) or reason_to_skip(path) is None)
        and os.path.isfile(path)
    ]


def _refuse_special(paths: Iterable[Path]) -> None:
    """Raise DataError for a path in which `datasets` would expand a variable or see an archive."""
    for path in paths:
        if os.path.expandvars(path) != str(path) or "::" in str(path):
            raise DataError(
                "DATA_NAME", f"the path {path} contains $ or ::, which datasets replaces: rename it"
            )


def _load_files(paths: Sequence[Path], cache_dir: Path | None) -> Any:
    from datasets import load_dataset

    _refuse_special(paths)
    names = [glob.escape(str(path)) for path in paths]
    cache = cache_of(paths, cache_dir)
    try:
        with _quiet(), _plain_members():
            return load_dataset(
                READERS[paths[0].suffix], data_files=names, cache_dir=cache, split="train"
            )
    except Exception as error:  # the readers of `datasets` raise errors of any type
        cause = error.__cause__ or error
        fact = f"{paths[0]} cannot be read by datasets ({type(cause).__name__}: {reason_of(cause)})"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: expected {EXPECTED}") from error


def _text_in(member: bytes) -> str:
    return member.decode().removesuffix("\n").removesuffix("\r")


@contextmanager
def _plain_members() -> Iterator[None]:
    """Keep members of tars as bytes, except texts, without their last line end, and numbers.

    `datasets` would hand a .pth file to `torch.load`.
    """
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    decoders = WebDataset.DECODERS
    WebDataset.DECODERS = {
        name: decode for name, decode in decoders.items() if name in _DECODED_MEMBERS
    } | dict.fromkeys(_TEXT_MEMBERS, _text_in)
    try:
        yield
    finally:
        WebDataset.DECODERS = decoders


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets`: each process would show several."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
