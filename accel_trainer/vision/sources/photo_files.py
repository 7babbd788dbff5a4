"""Opens photos on disk or on the hub as tables of `datasets`.

On disk they are in folders, parquet files, tars, or what `save_to_disk` wrote.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DataError, reason_of
from ...core.run_dir import expand_home
from .label_columns import FOLDER, refuse_unnamed_labels
from .layouts import refuse_described_splits
from .listing import METADATA
from .metadata import read_metadata
from .photo_folders import (
    SplitFolders,
    describe_shared_classes,
    find_classes,
    list_splits,
    read_class_folders,
)
from .raw import Opened
from .tables import READERS, has_tables, is_saved, opened, read_saved, read_table, read_tables

_PROBE_TIMEOUT_S = 5
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def open_dataset(
    source: str | Path, *, cache_dir: Path | None, label_column: str | None = None
) -> Opened:
    """Return the tables of a folder, a parquet or tar file, or a hub name.

    `datasets` writes its files about local data below `cache_dir`; None: in its default cache. If
    `label_column` is None or `folder`, the names of folders may be the classes.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: there is nothing, or nothing that is recognised.
    """
    if find_spec("datasets") is None:
        raise ConfigError("PACKAGE", "photos need datasets: pip install 'accel-trainer[vision]'")
    path = expand_home(Path(source))
    cache = expand_home(cache_dir) / "datasets" if cache_dir else None
    root = path.absolute()
    if path.is_dir():
        return replace(_open_folder(root, str(source), cache, label_column), root=root)
    if path.suffix in READERS and path.is_file():
        return read_table(root, cache)
    if path.exists():
        raise DataError(
            "DATA_NOT_A_FOLDER",
            f"{source} is not a folder, a parquet file or a tar file: give the folder of your "
            "photos, and extract an archive first",
        )
    if "://" in str(source) or str(source) == "-":
        fact = f"{source} is not a folder: photos on the web or from standard input are not read"
        raise DataError("DATA_NOT_FOUND", f"{fact}: download them, and give their folder")
    if not is_hub_name(str(source)):
        raise DataError(
            "DATA_NOT_FOUND",
            f"no folder {source}: give the folder of your photos (recipes: --dataset FOLDER), or "
            "OWNER/NAME on the hub",
        )
    return opened(load_from_hub(str(source)), str(source))


def is_hub_name(source: str) -> bool:
    """Return whether `source` is OWNER/NAME, and no file or folder on this machine."""
    return bool(_HUB_NAME.fullmatch(source)) and not expand_home(Path(source)).exists()


def load_from_hub(
    repository: str, *, revision: str | None = None, instead: str = "a different --dataset"
) -> Any:
    """Return a dataset of the hub, or from the Hugging Face cache if it was downloaded before.

    A `revision` of None is the newest. `instead` is what an error suggests to give.

    Raises:
        DataError: it is neither on the hub nor in the cache.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi, constants

    try:
        if not constants.HF_HUB_OFFLINE:
            # `load_dataset` retries for 24 s (datasets 5.2): first see whether the hub answers.
            HfApi().dataset_info(repository, revision=revision, timeout=_PROBE_TIMEOUT_S)
        return load_dataset(repository, revision=revision)
    except Exception as error:  # the hub and its HTTP library raise errors of any type
        where = "it cannot be loaded from the Hugging Face hub"
        fact = f"{repository} is not a folder here, and {where} ({reason_of(error)})"
        fix = "set HF_HUB_OFFLINE=1 if it was downloaded"
        if constants.HF_HUB_OFFLINE:
            fix = "unset HF_HUB_OFFLINE"
        raise DataError(
            "DATA_HUB", f"{fact}: check the name, give a folder or {instead}, or {fix}"
        ) from error


def _open_folder(root: Path, name: str, cache_dir: Path | None, label_column: str | None) -> Opened:
    if is_saved(root):
        return read_saved(root, name)
    if has_tables(root):
        return read_tables(root, cache_dir)
    if label_column == FOLDER:
        return open_class_folders(list_splits(root, described_by=()), name)
    found = list_splits(root)
    if found.metadata:
        return _open_metadata(found, name, label_column)
    return open_class_folders(found, name)


def open_class_folders(found: SplitFolders, name: str) -> Opened:
    """Return photos whose classes are the names of their folders."""
    return Opened(
        splits=read_class_folders(found, find_classes(found), name),
        left_out=[*found.left_out, *found.beside],
        facts=describe_shared_classes(found),
        has_columns=False,
    )


def _open_metadata(found: SplitFolders, name: str, label_column: str | None) -> Opened:
    """Return the photos that metadata files list. Raises DataError for unclear labels."""
    splits = {}
    left_out = list(found.beside)
    for split, listing in found.splits.items():
        if not listing.metadata:
            fact = f"{listing.folder} has no {' or '.join(METADATA)}, but another split has"
            raise DataError(
                "DATA_METADATA", f"{fact}: describe the photos of all splits, or of none"
            )
        refuse_described_splits(listing.folder, listing.folders)
        splits[split], unread = read_metadata(listing, found.root, name)
        left_out += unread
        if label_column is None:
            folders = set(map(os.path.basename, listing.folders))
            for table, path in zip(splits[split], listing.metadata, strict=True):
                refuse_unnamed_labels(table.dataset.features, str(path), folders)
    return Opened(splits=splits, left_out=left_out)
