"""Finds a dataset by name or folder: on the hub, in scikit-learn, or in files on this machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path

from ...core.errors import ConfigError, DataError
from ...core.filesystem import sha256_of
from ...core.run_dir import expand_home
from ..data.decode import decode_on_demand
from .arrow import read_hub, read_parquet
from .cifar_binary import find_binary, read_binary, refuse_pickles
from .digits import read_digits
from .label_columns import find_image_column, find_label_column
from .layouts import TRAIN_NAMES, VAL_NAMES, files_of_splits, train_and_val_in
from .links import refuse_two_classes
from .listing import describe_left_out, subfolders
from .notes import facts_about, warnings_about
from .photo_columns import read_columns
from .photo_files import open_class_folders
from .photo_folders import list_splits
from .photos import notes_on_pair
from .raw import ImageSource
from .stamps import hash_of_stamps
from .tables import types_of, unread_data

# A repository and its revision: another one would be read from the cache of this one.
_HUB = {
    "cifar10": ("uoft-cs/cifar10", "0b2714987fa478483af9968de7c934580d0bb9a2"),
    "cifar100": ("uoft-cs/cifar100", "aadb3af77e9048adbea6b47c21a81e47dd092ae5"),
}

DATASET_NAMES: tuple[str, ...] = (*_HUB, "digits")


def find_image_source(name_or_path: str) -> ImageSource:
    """Return the source of a dataset, without decoding it.

    Raises:
        ConfigError: it is neither a known name nor a folder.
        DataError: it is a folder in which no dataset can be recognised.
    """
    if name_or_path in _HUB:
        repository, revision = _HUB[name_or_path]
        return ImageSource(
            name=name_or_path,
            key=f"hub:{repository}@{revision}",
            read=partial(read_hub, repository, revision),
        )
    if name_or_path == "digits":
        return ImageSource(name="digits", key="scikit-learn:digits", read=read_digits)
    path = expand_home(Path(name_or_path))
    if path.is_dir():
        return _find_in_folder(path)
    if path.exists():
        raise DataError(
            "DATA_NOT_A_FOLDER",
            f"--dataset {name_or_path} is a file: extract it if necessary and give its folder",
        )
    if os.sep in name_or_path or name_or_path.startswith((".", "~")):
        raise DataError(
            "DATA_NOT_FOUND", f"no folder {name_or_path}: give an existing one, or {_choices()}"
        )
    near = get_close_matches(name_or_path, DATASET_NAMES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        "DATA_NAME",
        f"no dataset or folder {name_or_path!r}: {hint}--dataset is {_choices()}, or a folder; "
        "recipes/images.py also takes OWNER/NAME on the hub",
    )


def _choices() -> str:
    return f"{', '.join(DATASET_NAMES[:-1])} or {DATASET_NAMES[-1]}"


def _find_in_folder(root: Path) -> ImageSource:
    """Recognise parquet files, CIFAR's binary files, or one folder per class."""
    # A hub snapshot keeps its files in `data/` or in a folder named after the configuration.
    for folder in (root, *subfolders(root)):
        tables = files_of_splits(folder, sorted(folder.glob("*.parquet")))
        train, val = train_and_val_in(tables)
        if train and val:
            types = types_of(train[0])
            image = find_image_column(types, None, str(train[0]))
            label = find_label_column(types, None, str(train[0]))
            later = [path for path in chain(*tables.values()) if path not in (*train, *val)]
            unread = unread_data(root, set(map(str, (*train, *val, *later))))
            return ImageSource(
                name=_name(root),
                key=_content_key([*train, *val]),
                read=partial(read_parquet, train, val),
                notes=tuple(describe_left_out(unread)),
                facts=(
                    f"images from column {image}, classes from column {label}",
                    *(f"not used: {path}" for path in later),
                ),
            )
        if binary := find_binary(folder):
            return ImageSource(
                name=_name(root),
                key=_content_key([*binary.train, *binary.test]),
                read=partial(read_binary, binary),
                notes=tuple(describe_left_out(unread_data(root, ()))),
            )
        refuse_pickles(folder)
    if source := _class_folders(root):
        return source
    raise DataError(
        "DATA_NOT_RECOGNISED",
        f"no dataset in {root}: expected train*.parquet and val*.parquet, CIFAR's binary files "
        "(data_batch_1.bin ... or train.bin, and a test file), or images in train/<class>/ and "
        "val/<class>/",
    )


def _class_folders(root: Path) -> ImageSource | None:
    """Return the source of folders of classes; None: they have no images to evaluate on."""
    names = {path.name.lower() for path in subfolders(root)}
    if names.isdisjoint(TRAIN_NAMES) or names.isdisjoint(VAL_NAMES):
        return None
    found = list_splits(root)
    for table in found.metadata:
        fact = f"{table} describes the images, but this recipe takes the classes from the folders"
        raise DataError("DATA_METADATA", f"{fact}: use recipes/images.py, or remove the file")
    data = replace(open_class_folders(found, str(root)), root=root)
    if len(data.splits) < 2:
        return None
    splits = list(data.splits.values())
    columns = read_columns(data, splits)
    refuse_two_classes(columns)
    notes = notes_on_pair(columns)
    return ImageSource(
        name=_name(root),
        key=f"stat:{hash_of_stamps(found.photos)}",
        read=partial(decode_on_demand, *columns.splits, class_names=columns.class_names),
        notes=(*warnings_about(data, columns), *notes),
        facts=facts_about(data, columns, used=splits),
    )


def _name(root: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name)[:40] or "images"


def _content_key(files: Iterable[Path]) -> str:
    """Identify a few large files by their content, so that copies use the same cache."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(bytes.fromhex(sha256_of(path.resolve())))
    return f"content:{digest.hexdigest()}"
