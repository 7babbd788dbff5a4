"""Opens photos on disk or on the hub as a `datasets.Dataset`.

On disk they are in folders, parquet files, webdataset tars, or what `save_to_disk` wrote.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DataError
from ...core.filesystem import read_file
from ...core.run_dir import expand_home
from .photo_folders import EXPECTED, METADATA, Listing, list_splits, read_class_folders

_PROBE_TIMEOUT_S = 5
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_READERS = {".parquet": "parquet", ".tar": "webdataset"}
_ELSEWHERE = re.compile(r"^[/~\\]|^\w:|(^|[/\\])\.\.([/\\]|$)|://|::")
_MAX_DESCRIPTION_BYTES = 2**24
_MAX_METADATA_BYTES = 2**32
_DECODED_MEMBERS = ("txt", "text", "transcript", "cls", "cls2", "index", "inx", "id", "json", "jsn")


def open_dataset(source: str | Path, *, cache_dir: Path | None) -> Any:
    """Return the `Dataset` or `DatasetDict` of a folder, a parquet or tar file, or a hub name.

    `datasets` writes its files about local data below `cache_dir`; None: in its default cache.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: there is nothing, or nothing that is recognised.
    """
    if find_spec("datasets") is None:
        raise ConfigError("PACKAGE", "photos need datasets: pip install 'accel-trainer[vision]'")
    path = expand_home(Path(source))
    if path.is_dir():
        return _open_folder(path.absolute(), _cache(cache_dir))
    if path.suffix in _READERS and path.is_file():
        return _load_file(_READERS[path.suffix], path.absolute(), _cache(cache_dir))
    if path.exists():
        raise DataError(
            "DATA_NOT_A_FOLDER", f"{source} is not a folder, parquet or a tar: extract it"
        )
    if not is_hub_name(str(source)):
        raise DataError(
            "DATA_NOT_FOUND", f"no folder {source}: give an existing one, or OWNER/NAME on the hub"
        )
    return load_from_hub(str(source))


def is_hub_name(source: str) -> bool:
    """Return whether `source` is OWNER/NAME, and no file or folder on this machine."""
    return bool(_HUB_NAME.fullmatch(source)) and not expand_home(Path(source)).exists()


def load_from_hub(repository: str) -> Any:
    """Return a dataset of the hub, or from the Hugging Face cache if it was downloaded before.

    Raises:
        DataError: it is neither on the hub nor in the cache.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi, constants

    try:
        if not constants.HF_HUB_OFFLINE:
            # `load_dataset` retries for 24 s (datasets 5.2): first see whether the hub answers.
            HfApi().dataset_info(repository, timeout=_PROBE_TIMEOUT_S)
        return load_dataset(repository)
    except Exception as error:  # the hub and its HTTP library raise errors of any type
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        where = "it cannot be loaded from the Hugging Face hub"
        fact = f"no folder {repository}, and {where} ({reason})"
        fix = "set HF_HUB_OFFLINE=1 if it was downloaded"
        if constants.HF_HUB_OFFLINE:
            fix = "unset HF_HUB_OFFLINE"
        raise DataError(
            "DATA_HUB", f"{fact}: check the name, give a local folder, or {fix}"
        ) from error


def _cache(cache_dir: Path | None) -> str | None:
    return str(expand_home(cache_dir) / "datasets") if cache_dir else None


def _open_folder(root: Path, cache_dir: str | None) -> Any:
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return _open_saved(root)
    if _has_tables(root):
        return _open_tables(root, cache_dir)
    splits = list_splits(root)
    if any(listing.metadata for listing in splits.values()):
        return _open_metadata(splits, cache_dir)
    return read_class_folders(root, splits)


def _open_saved(root: Path) -> Any:
    """Return what `save_to_disk` wrote. Its JSON files may only name files in their own folder."""
    from datasets import load_from_disk

    if "::" in str(root):
        raise DataError(
            "DATA_NAME", f"the path {root} has ::, where datasets would split it: rename it"
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
        return []  # `datasets` will say what is wrong with the file
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
            fact = f"{description} names {name!r}, which is not a file beside it"
            raise DataError("DATA_OUTSIDE", f"{fact}: write the data again with save_to_disk")


def _open_tables(root: Path, cache_dir: str | None) -> Any:
    """Return the splits of parquet files or tars, found by their names as on the hub."""
    _refuse_special([root, *root.rglob("*")])
    if glob.has_magic(str(root)):
        raise DataError(
            "DATA_NAME", f"the path {root} has one of *, ? and [, which datasets expands: rename it"
        )
    for card in (root / "README.md", root / ".huggingface.yaml"):
        if card.exists():
            _check_card(card)
    return _load(str(root), root, cache_dir=cache_dir)


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
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            "DATA_CARD", f"{card} cannot be read ({reason}): repair or remove it"
        ) from error
    for text in strings:
        if _ELSEWHERE.search(text) or os.path.expandvars(text) != text:
            fact = f"{card} names data outside its folder ({text})"
            raise DataError("DATA_OUTSIDE", f"{fact}: remove configs from its header")


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


def _open_metadata(splits: dict[str, Listing], cache_dir: str | None) -> Any:
    """Return the photos that metadata files name. `datasets` is given only the metadata files."""
    from datasets import DatasetDict, concatenate_datasets

    loaded = {}
    for name, listing in splits.items():
        if not listing.metadata:
            fact = f"{listing.folder} has no {' or '.join(METADATA)}, but another split has"
            raise DataError(
                "DATA_METADATA", f"{fact}: describe the photos of all splits, or of none"
            )
        for path in listing.metadata:
            _refuse_huge(path)
        parts = [_load_file("imagefolder", path, cache_dir)["train"] for path in listing.metadata]
        loaded[name] = _checked(partial(concatenate_datasets, parts), listing.folder)
    return DatasetDict(loaded)


def _refuse_huge(table: Path) -> None:
    """Raise DataError for a table that would fill the memory: a file may claim any size."""
    num_bytes = table.stat().st_size
    if num_bytes > _MAX_METADATA_BYTES:
        fact = f"{table} has {num_bytes} bytes, more than {_MAX_METADATA_BYTES}"
        raise DataError("DATA_METADATA", f"{fact}: write the data as parquet")


def _refuse_special(paths: Iterable[Path]) -> None:
    """Raise DataError for a path in which `datasets` would expand a variable or see an archive."""
    for path in paths:
        if os.path.expandvars(path) != str(path) or "::" in str(path):
            raise DataError(
                "DATA_NAME", f"the path {path} has $ or ::, which datasets would change: rename it"
            )


def _load_file(reader: str, path: Path, cache_dir: str | None) -> Any:
    _refuse_special([path])
    return _load(reader, path, data_files=glob.escape(str(path)), cache_dir=cache_dir)


def _load(name: str, path: Path, **options: Any) -> Any:
    from datasets import load_dataset

    return _checked(lambda: load_dataset(name, **options), path)


def _checked(load: Callable[[], Any], path: Path) -> Any:
    try:
        with _quiet(), _plain_members():
            return load()
    except Exception as error:  # the readers of `datasets` raise errors of any type
        reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
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


@contextmanager
def _plain_members() -> Iterator[None]:
    """Keep members of tars as bytes, except texts and numbers.

    `datasets` would hand a .pth file to `torch.load`.
    """
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    decoders = WebDataset.DECODERS
    WebDataset.DECODERS = {
        name: decode for name, decode in decoders.items() if name in _DECODED_MEMBERS
    }
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


def _has_tables(root: Path) -> bool:
    """Return whether there are parquet files or tars in the folder or in one of its folders."""
    patterns = ("*.parquet", "*.tar", "*/*.parquet", "*/*.tar")
    return any(path.name not in METADATA for pattern in patterns for path in root.glob(pattern))
