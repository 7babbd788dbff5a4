"""Reads tables through HuggingFace `datasets`: parquet files, tars, and what `save_to_disk` wrote.

Nothing in these files is expanded, followed elsewhere, or run.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import DataError, reason_of
from ...core.filesystem import read_file
from .layouts import EXPECTED, refuse_tables_of_splits
from .listing import METADATA, LeftOut, reason_to_skip, subfolders
from .parquet_files import have_same_types, read_by_types
from .raw import Opened, Split, Table
from .stamps import cache_of
from .tar_files import check_samples, index_tar

READERS = {".parquet": "parquet", ".tar": "webdataset"}
"""The suffixes of tables, and the names of their readers in `datasets`."""

_ELSEWHERE = re.compile(r"^[/~\\]|^\w:|(^|[/\\])\.\.([/\\]|$)|://|::")
_MAX_DESCRIPTION_BYTES = 2**24
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
    """Return what `save_to_disk` wrote; `name` describes it in errors."""
    dataset = _open_saved(root)
    folders = [root / split for split in dataset] if isinstance(dataset, Mapping) else [root]
    read = {
        str(folder / str(file.get("filename")))
        for folder in folders
        for file in _names_in(folder / "state.json", "_data_files")
        if isinstance(file, dict)
    }
    return replace(opened(dataset, name), left_out=unread_data(root, read))


def read_table(path: Path, name: str, cache_dir: Path | None) -> Opened:
    """Return one parquet file or tar as the split `train`."""
    reader = READERS[path.suffix]

    def load() -> Mapping[str, Split]:
        return {"train": [Table(_load_files(reader, [path], cache_dir), name)]}

    if reader == "webdataset":
        return _read_tars([path], load)
    return Opened(splits=load())


def read_tables(root: Path, name: str, cache_dir: Path | None) -> Opened:
    """Return the splits of parquet files or tars, found by their names as on the hub."""
    from datasets import load_dataset_builder

    below = list(root.rglob("*"))
    _refuse_special([root, *below])
    if glob.has_magic(str(root)):
        raise DataError(
            "DATA_NAME", f"the path {root} contains *, ? or [, which datasets expands: rename it"
        )
    cards = [card for card in (root / "README.md", root / ".huggingface.yaml") if card.exists()]
    for card in cards:
        _check_card(card)
    stored = sorted(path for path in below if path.suffix in READERS and path.is_file())
    cache = cache_of([*cards, *stored], cache_dir)
    builder = _checked(lambda: load_dataset_builder(str(root), cache_dir=cache), root)
    if builder.name not in READERS.values():
        fact = f"{root} mixes parquet files or tars with files of type {builder.name}"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: move one kind to a different folder")
    files = {
        str(split): [Path(path) for path in paths]
        for split, paths in builder.config.data_files.items()
    }
    all_files = [path for paths in files.values() for path in paths]
    if len(files) == 1:
        refuse_tables_of_splits(root, all_files)
    unread = unread_data(root, set(map(str, all_files)))

    def load() -> Mapping[str, Split]:
        builder.download_and_prepare()
        return opened(builder.as_dataset(), name).splits

    if builder.name == "webdataset":
        tars = _read_tars(all_files, partial(_checked, load, root))
        return replace(tars, left_out=[*tars.left_out, *unread])
    if _checked(lambda: have_same_types(all_files, builder.info.features), root):
        return Opened(splits=_checked(load, root), left_out=unread)
    splits = {
        split: read_by_types(paths, lambda some: _load_files("parquet", some, cache_dir))
        for split, paths in files.items()
    }
    return Opened(splits=splits, left_out=unread)


def _read_tars(paths: Sequence[Path], load: Callable[[], Mapping[str, Split]]) -> Opened:
    """Return the samples that `load` reads of tars, once these are checked."""
    tars = [index_tar(path) for path in paths]
    for tar in tars:
        check_samples(tar)
    return Opened(splits=load(), left_out=[each for tar in tars for each in tar.left_out])


def unread_data(root: Path, read: Collection[str]) -> list[LeftOut]:
    """Return the tables and photos below a folder that are not in `read`."""
    suffixes = (*READERS, ".arrow")
    return [
        LeftOut(path, "not a table of any split", is_loss=True)
        for path in sorted(map(str, root.rglob("*")))
        if path not in read
        and (path.endswith(suffixes) or reason_to_skip(path) is None)
        and os.path.isfile(path)
    ]


def _open_saved(root: Path) -> Any:
    """Return what `save_to_disk` wrote. Its JSON files may only name files in their own folder."""
    from datasets import load_from_disk

    if "::" in str(root):
        raise DataError(
            "DATA_NAME", f"the path {root} contains ::, where datasets would split it: rename it"
        )
    for splits in root.glob("dataset_dict.json"):
        _refuse_others(splits, _names_in(splits, "splits"))
    for state in (*root.glob("state.json"), *root.glob("*/state.json")):
        files = _names_in(state, "_data_files")
        names = [file.get("filename") if isinstance(file, dict) else file for file in files]
        _refuse_others(state, names)
    for info in (*root.glob("dataset_info.json"), *root.glob("*/dataset_info.json")):
        _read_description(info)
    return _checked(lambda: load_from_disk(str(root)), root)


def _names_in(path: Path, key: str) -> list[Any]:
    try:
        names = json.loads(_read_description(path))[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # `datasets` will report what is wrong with the file
    return names if isinstance(names, list) else []


def _read_description(path: Path) -> bytes:
    """Return a file that `datasets` will read. Raises DataError for a pipe, or a huge file."""
    try:
        return read_file(path.resolve(), max_bytes=_MAX_DESCRIPTION_BYTES)
    except OSError as error:
        fact = f"{path} cannot be read ({error.strerror})"
        raise DataError("DATA_DAMAGED", f"{fact}: write the data again with save_to_disk") from None


def _refuse_others(description: Path, names: list[Any]) -> None:
    """Raise DataError for a name that leads elsewhere, or to a pipe."""
    for name in map(str, names):
        place = description.with_name(name) if name == os.path.basename(name) and name else None
        if place is None or (place.exists() and not (place.is_file() or place.is_dir())):
            fact = f"{description} refers to {name!r}, which is not a file beside it"
            raise DataError("DATA_OUTSIDE", f"{fact}: write the data again with save_to_disk")


def _check_card(card: Path) -> None:
    """Raise DataError if a dataset's card names data elsewhere, such as on another machine."""
    import yaml
    from huggingface_hub import DatasetCard

    try:
        text = read_file(card.resolve(), max_bytes=_MAX_DESCRIPTION_BYTES).decode()
        is_yaml = card.suffix == ".yaml"
        header = text if is_yaml else text.partition("---")[2].partition("\n---")[0]
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header, yaml.SafeLoader)):
            raise ValueError("aliases (& and *) are not supported")
        content: Any = yaml.safe_load(text) or {} if is_yaml else DatasetCard(text).data
        strings = list(_strings_in(content.get("configs")))
    except Exception as error:
        # Errors of any type: it may be a pipe, or YAML that is damaged or nested too deeply.
        reason = reason_of(error)
        raise DataError(
            "DATA_CARD", f"{card} cannot be read ({reason}): repair it, or remove it"
        ) from error
    for text in strings:
        if _ELSEWHERE.search(text) or os.path.expandvars(text) != text:
            fact = f"{card} refers to data outside its folder ({text})"
            raise DataError("DATA_OUTSIDE", f"{fact}: remove `configs` from its header")


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and values of dicts; what a YAML alias repeats, once."""
    waiting = [value]
    seen = set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each


def _refuse_special(paths: Iterable[Path]) -> None:
    """Raise DataError for a path in which `datasets` would expand a variable or see an archive."""
    for path in paths:
        if os.path.expandvars(path) != str(path) or "::" in str(path):
            raise DataError(
                "DATA_NAME", f"the path {path} contains $ or ::, which datasets replaces: rename it"
            )


def _load_files(reader: str, paths: Sequence[Path], cache_dir: Path | None) -> Any:
    from datasets import load_dataset

    _refuse_special(paths)
    names = [glob.escape(str(path)) for path in paths]
    cache = cache_of(paths, cache_dir)
    load = partial(load_dataset, reader, data_files=names, cache_dir=cache, split="train")
    return _checked(load, paths[0])


def _checked(load: Callable[[], Any], path: Path) -> Any:
    try:
        with _quiet(), _plain_members():
            return load()
    except Exception as error:  # the readers of `datasets` raise errors of any type
        reason = reason_of(error.__cause__ or error)
        if damaged := _find_damaged(path):
            raise DataError(
                "DATA_DAMAGED", f"{damaged} is damaged ({reason}): restore it, or write it again"
            ) from error
        kind = type(error.__cause__ or error).__name__
        fact = f"{path} cannot be read by datasets ({kind}: {reason})"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: expected {EXPECTED}") from error


def _find_damaged(root: Path) -> Path | None:
    """Return the first file below a folder that cannot be opened; `datasets` does not name it."""
    import pyarrow.parquet as pq
    from datasets.table import MemoryMappedTable

    readers: dict[str, Callable[[str], Any]] = {
        ".arrow": MemoryMappedTable.from_file,
        ".json": lambda name: json.loads(read_file(Path(name), max_bytes=_MAX_DESCRIPTION_BYTES)),
        ".parquet": pq.read_metadata,
    }
    found = [path for path in root.rglob("*") if path.suffix in readers and path.is_file()]
    for path in sorted(found):
        try:
            readers[path.suffix](str(path))
        except Exception:  # the readers raise errors of any type
            return path
    return None


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
