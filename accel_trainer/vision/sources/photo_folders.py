"""Lists folders of photos, and reads folders of classes.

File names are taken literally here: `datasets` would expand variables in them, and split addresses.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import DataError

_logger = logging.getLogger(__name__)

VAL_NAMES = ("validation", "val", "valid", "dev", "test", "testing", "eval", "evaluation")
"""The names of splits to evaluate on; the first that exists is used."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of the files that describe photos by `file_name`."""
EXPECTED = (
    "train/<class>/*.jpg with or without val/<class>/*.jpg, <class>/*.jpg, metadata.csv, parquet, "
    "or tars"
)

_TRAIN_FOLDERS = ("train", "training")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The photos below a folder, in order, and its metadata files and archives, if any."""

    folder: Path
    photos: list[str]
    metadata: list[Path]
    archives: list[str]


def list_splits(root: Path) -> dict[str, Listing]:
    """Return a listing for each split.

    A folder `train` that holds images itself is a class of that name, and not a split.

    Raises DataError if there is no photo in `root`.
    """
    splits = {name: _list(folder) for name, folder in _split_folders(root).items()}
    if not any(listing.photos for listing in splits.values()):
        others = {
            os.path.splitext(path)[1].lower() or os.path.basename(path)
            for path in _files_below(root)
        }
        found = f"only {', '.join(sorted(others)[:5])} files" if others else "no files"
        raise DataError("DATA_NOT_RECOGNISED", f"no photos in {root}, {found}: expected {EXPECTED}")
    return splits


def read_class_folders(root: Path, splits: Mapping[str, Listing]) -> Any:
    """Return a `DatasetDict` whose labels are the names of the photos' folders.

    It holds the paths of the photos; none is read.
    """
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image
    from datasets.table import InMemoryTable

    for listing in splits.values():
        _check_archives(root, listing.archives)
    names = _class_names(root, [path for listing in splits.values() for path in listing.photos])
    number_of = {name: number for number, name in enumerate(names)}
    info = DatasetInfo(
        features=Features({"image": Image(decode=False), "label": ClassLabel(names=names)})
    )
    loaded = {}
    for split, listing in splits.items():
        paths = pa.array(listing.photos, pa.string())
        no_bytes = pa.nulls(len(paths), pa.binary())
        images = pa.StructArray.from_arrays([no_bytes, paths], names=["bytes", "path"])
        labels = pa.array([number_of[_class_of(path)] for path in listing.photos], pa.int64())
        table = InMemoryTable(pa.table({"image": images, "label": labels}))
        # Without a given fingerprint, `Dataset` hashes all paths.
        loaded[split] = Dataset(table, info=info.copy(), fingerprint=split)
    return DatasetDict(loaded)


def _split_folders(root: Path) -> dict[str, Path]:
    if _has_metadata(root):
        return {"train": root}
    splits = {
        path.name.lower(): path for path in _folders(root) if _folders(path) or _has_metadata(path)
    }
    train = next((splits[name] for name in _TRAIN_FOLDERS if name in splits), None)
    val = next((splits[name] for name in VAL_NAMES if name in splits), None)
    if train is None:
        if val is not None and len(splits) == len(_folders(root)) and set(splits) <= set(VAL_NAMES):
            raise DataError(
                "DATA_NOT_RECOGNISED", f"{root} has {val.name}/ but no train/: expected {EXPECTED}"
            )
        return {"train": root}
    return {"train": train} if val is None else {"train": train, "validation": val}


def _has_metadata(folder: Path) -> bool:
    return any((folder / name).is_file() for name in METADATA)


def _folders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _list(folder: Path) -> Listing:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    suffixes = frozenset(ImageFolder.EXTENSIONS)
    is_described = _has_metadata(folder)
    photos: list[str] = []
    metadata: list[Path] = []
    archives: list[str] = []
    for path in _files_below(folder):
        suffix = os.path.splitext(path)[1].lower()
        if suffix in suffixes:
            photos.append(path)
        elif is_described and os.path.basename(path) in METADATA:
            metadata.append(Path(path))
        elif suffix == ".zip":
            archives.append(path)
    return Listing(folder=folder, photos=photos, metadata=metadata, archives=archives)


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, sorted, then the files below each link to a folder in it.

    Links in deeper folders are not followed. Hidden files and folders are left out, and so are
    folders like `__MACOSX`.
    """
    real = folder.resolve()
    links = [path for path in _folders(folder) if path.is_symlink()]
    for link in links:
        if real.is_relative_to(link.resolve()):
            fact = f"{link} is a link back to {link.resolve()}, a folder that it lies in"
            raise DataError("DATA_LINK", f"{fact}: remove it")
    for start in (folder, *links):
        found: list[str] = []
        for place, folders, names in os.walk(start, onerror=_refuse_unreadable):
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            unseen = [path for name in folders if os.path.islink(path := os.path.join(place, name))]
            if unseen and place != str(folder):
                _logger.warning(
                    "%s is a link to a folder in a folder, and is not followed: move it up",
                    unseen[0],
                )
            paths = (os.path.join(place, name) for name in names if not name.startswith("."))
            found += [path for path in paths if os.path.isfile(path)]
        yield from sorted(found)


def _refuse_unreadable(error: OSError) -> None:
    fact = f"{error.filename} cannot be listed ({error.strerror})"
    raise DataError("DATA_NOT_READABLE", f"{fact}: give this user the right to read it") from error


def _check_archives(root: Path, archives: list[str]) -> None:
    """Raise DataError if a zip among the photos holds photos, because it would not be read."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    for path in archives:
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.namelist()
        except (OSError, zipfile.BadZipFile):
            continue
        if any(os.path.splitext(name)[1].lower() in ImageFolder.EXTENSIONS for name in members):
            fact = f"{root} has photos and an archive of photos ({path})"
            raise DataError("DATA_ARCHIVE", f"{fact}: extract it, or move it to another folder")


def _class_of(path: str) -> str:
    return os.path.basename(os.path.dirname(path))


def _class_names(root: Path, paths: list[str]) -> list[str]:
    """Return the names of the class folders, sorted.

    Raises DataError if the folders cannot be classes.
    """
    for path in paths:
        if not path.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path):
            raise DataError("DATA_NAME", f"the name of {path!a} is not UTF-8: rename it")
    names = sorted({_class_of(path) for path in paths})
    by_depth = {path.count(os.sep): os.path.relpath(path, root) for path in paths}
    if len(by_depth) > 1:
        shallow = by_depth[min(by_depth)]
        deep = by_depth[max(by_depth)]
        fact = (
            f"the photos in {root} are at different depths ({shallow} and {deep}), so their "
            "classes are unclear"
        )
        raise DataError(
            "DATA_DEPTH", f"{fact}: move them all into <class>/ folders of the same depth"
        )
    if len(names) == 1:
        folder = os.path.dirname(next(iter(by_depth.values()))) or "."
        fact = f"all {len(paths)} photos of {root} are in one class folder ({folder})"
        raise DataError(
            "DATA_NO_CLASSES", f"{fact}, so there is nothing to tell apart: expected {EXPECTED}"
        )
    if {name.lower() for name in names} <= {*_TRAIN_FOLDERS, *VAL_NAMES}:
        fact = f"{root} has no class folders: {' and '.join(names)} hold photos themselves"
        raise DataError("DATA_NO_CLASSES", f"{fact}: expected {EXPECTED}")
    return names
