"""Finds a dataset by name or folder: on the hub, in scikit-learn, or in files on this machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from ...core.errors import ConfigError, DataError
from ...core.filesystem import sha256_of
from ...core.run_dir import expand_home
from .arrow import read_hub, read_parquet
from .cifar_binary import find_binary, read_binary, refuse_pickles
from .digits import read_digits
from .image_folder import list_images, read_image_folder
from .raw import ImageSource, RawImages

_HUB = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}

DATASET_NAMES: tuple[str, ...] = (*_HUB, "digits")

# Names of the held-out images; the first that exists is used.
_TEST_NAMES = ("test", "validation", "val")


def find_image_source(name_or_path: str) -> ImageSource:
    """Return the source of a dataset, without decoding it.

    Raises:
        ConfigError: it is neither a known name nor a folder.
        DataError: it is a folder in which no dataset can be recognised.
    """
    if name_or_path in _HUB:
        repository = _HUB[name_or_path]
        return ImageSource(
            name=name_or_path,
            key=f"hub:{repository}",
            read=partial(read_hub, repository),
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
        "DATA_NAME", f"no dataset {name_or_path!r}: {hint}--dataset is {_choices()}, or a folder"
    )


def _choices() -> str:
    return f"{', '.join(DATASET_NAMES[:-1])} or {DATASET_NAMES[-1]}"


def _find_in_folder(root: Path) -> ImageSource:
    """Recognise parquet files, CIFAR's binary files, or one folder per class."""
    # A hub snapshot keeps its files in `data/` or in a folder named after the configuration.
    for folder in (root, *sorted(path for path in root.iterdir() if path.is_dir())):
        train = sorted(folder.glob("train*.parquet"))
        test = _test_parquet(folder)
        if train and test:
            return _source(root, _content_key([*train, *test]), partial(read_parquet, train, test))
        if binary := find_binary(folder):
            return _source(root, _content_key(binary.files), partial(read_binary, binary))
        refuse_pickles(folder)
    test_folder = next((root / name for name in _TEST_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test_folder is not None:
        train = list_images(root / "train")
        test = list_images(test_folder)
        return _source(root, _stat_key([*train, *test]), partial(read_image_folder, train, test))
    raise DataError(
        "DATA_NOT_RECOGNISED",
        f"no dataset in {root}: expected train*.parquet and test*.parquet, CIFAR's binary files "
        "(data_batch_1.bin ... or train.bin, and a test file), or images in train/<class>/ and "
        "test/<class>/",
    )


def _test_parquet(folder: Path) -> list[Path]:
    for name in _TEST_NAMES:
        if files := sorted(folder.glob(f"{name}*.parquet")):
            return files
    return []


def _source(root: Path, key: str, read: Callable[[], RawImages]) -> ImageSource:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name)[:40] or "images"
    return ImageSource(name=name, key=key, read=read)


def _content_key(files: Iterable[Path]) -> str:
    """Identify a few large files by their content, so that copies use the same cache."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(bytes.fromhex(sha256_of(path.resolve())))
    return f"content:{digest.hexdigest()}"


def _stat_key(files: Iterable[Path]) -> str:
    """Identify many small files by path, size and time: reading them takes as long as decoding."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return f"stat:{digest.hexdigest()}"
