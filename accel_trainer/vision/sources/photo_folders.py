"""Reads folders of classes: `train/<class>/*` and `val/<class>/*`, or `<class>/*`.

File names are taken literally here: `datasets` would expand variables in them, and split addresses.
"""

from __future__ import annotations

import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import DataError, listed
from ...core.wording import counted
from .class_names import Names, check_class_names, numbers_in
from .layouts import (
    EXPECTED,
    SPLIT_NAMES,
    TABLES,
    refuse_inner_splits,
    refuse_other_layouts,
    train_and_val_in,
)
from .listing import (
    BROKEN_LINK,
    LITTER,
    METADATA,
    LeftOut,
    Listing,
    images_at,
    is_described,
    is_litter,
    list_photos,
    reason_to_skip,
    skipped,
    subfolders,
)
from .raw import Split, Table


@dataclass(frozen=True, kw_only=True)
class SplitFolders:
    """The files of each split of a folder; `beside` is what lies beside the splits."""

    root: Path
    splits: Mapping[str, Listing]
    beside: tuple[LeftOut, ...] = ()

    @property
    def photos(self) -> list[str]:
        """The photos of all splits."""
        return [path for listing in self.splits.values() for path in listing.photos]

    @property
    def metadata(self) -> list[Path]:
        """The files that describe photos, of all splits."""
        return [path for listing in self.splits.values() for path in listing.metadata]

    @property
    def left_out(self) -> list[LeftOut]:
        """What is left out of the splits."""
        return [each for listing in self.splits.values() for each in listing.left_out]


def list_splits(root: Path, *, described_by: Sequence[str] = METADATA) -> SplitFolders:
    """Return the photos of each split, and everything that is left out.

    A folder `train` that holds images itself is a class of that name, and not a split. Files with
    one of the names `described_by` are metadata.

    Raises DataError if there is no photo in `root`, or if it is unclear which folder is a split.
    """
    folders = _split_folders(root, described_by)
    splits = {
        name: list_photos(folder, described_by=described_by) for name, folder in folders.items()
    }
    found = SplitFolders(root=root, splits=splits, beside=tuple(_beside(root, folders)))
    if not (found.photos or found.metadata):
        others = [os.path.basename(each.path) for each in found.left_out]
        names = [name for name in others if not is_litter(name)]
        kinds = sorted({os.path.splitext(name)[1].lower() or name for name in names})
        what = f"only {', '.join(kinds[:5])} files" if kinds else "which has no files"
        raise DataError("DATA_NOT_RECOGNISED", f"no photos in {root}, {what}: expected {EXPECTED}")
    return found


def find_classes(found: SplitFolders) -> Names:
    """Return the names of the class folders, sorted.

    Raises DataError if the folders cannot be classes, or if nothing is read of one of them.
    """
    root = found.root
    paths = found.photos
    for path in paths:
        if not path.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path):
            raise DataError("DATA_NAME", f"the name of {path!a} is not UTF-8: rename it")
    _refuse_archives(found)
    depths = {path.count(os.sep): path for path in paths}
    if len(depths) > 1:
        both = " and ".join(os.path.relpath(depths[each(depths)], root) for each in (min, max))
        fact = (
            f"the photos in {root} are at different depths ({both}), so their classes are unclear"
        )
        raise DataError(
            "DATA_DEPTH", f"{fact}: move them all into <class>/ folders of the same depth"
        )
    for listing in found.splits.values():
        _refuse_unread_classes(listing)
    for listing in found.splits.values():
        refuse_inner_splits(listing.folder, listing.folders)
    folders = [folder for listing in found.splits.values() for folder in listing.folders]
    names = sorted(set(map(os.path.basename, folders)))
    if len(names) == 1:
        _refuse_single_class(found, os.path.relpath(folders[0], root), len(paths))
    if {name.lower() for name in names} <= {*SPLIT_NAMES}:
        fact = f"{root} has no class folders: {' and '.join(names)} hold photos themselves"
        raise DataError("DATA_NO_CLASSES", f"{fact}: expected {EXPECTED}")
    refuse_other_layouts(root, names)
    check_class_names(names, str(root))
    return tuple(names)


def class_of(path: str) -> str:
    """Return the name of the folder that a photo is in."""
    return os.path.basename(os.path.dirname(path))


def read_class_folders(found: SplitFolders, names: Sequence[str], name: str) -> dict[str, Split]:
    """Return the tables of each split, whose labels are the names of the photos' folders.

    They hold the paths of the photos; none is read. `name` describes them in errors.
    """
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, DatasetInfo, Features, Image
    from datasets.table import InMemoryTable

    info = DatasetInfo(
        features=Features({"image": Image(decode=False), "label": ClassLabel(names=list(names))})
    )
    loaded = dict[str, Split]()
    for split, listing in found.splits.items():
        images = images_at(listing.photos)
        labels = numbers_in(names, list(map(class_of, listing.photos)))
        table = InMemoryTable(pa.table({"image": images, "label": labels}))
        # Without a given fingerprint, `Dataset` hashes all paths.
        dataset = Dataset(table, info=info.copy(), fingerprint=split)
        inodes = np.array(listing.inodes, np.uint64)
        loaded[split] = [Table(dataset, name, {"image": inodes} if len(inodes) else {})]
    return loaded


def describe_shared_classes(found: SplitFolders) -> list[str]:
    """Return a line for each class with photos of several folders, such as cat/adult, dog/adult."""
    folders = defaultdict[str, set[str]](set)
    for listing in found.splits.values():
        for place in listing.folders:
            folders[os.path.basename(place)].add(os.path.relpath(place, listing.folder))
    return [
        f"class {name} combines several folders: {listed(places)}"
        for name, places in folders.items()
        if len(places) > 1
    ]


def _split_folders(root: Path, described_by: Sequence[str]) -> dict[str, Path]:
    if is_described(root, by=described_by):
        return {"train": root}
    folders = subfolders(root)
    splits: dict[str, Path] = {}
    for path in folders:
        if not subfolders(path) and not is_described(path, by=described_by):
            continue
        name = path.name.lower()
        if name in splits and name in SPLIT_NAMES:
            fact = f"the folders {splits[name].name} and {path.name} in {root}"
            raise DataError("DATA_NOT_RECOGNISED", f"{fact} are the same split: rename one of them")
        splits[name] = path
    train, val = train_and_val_in(splits)
    if train is not None:
        return {"train": train} if val is None else {"train": train, "validation": val}
    if val is not None:
        raise DataError(
            "DATA_NOT_RECOGNISED", f"{root} has {val.name}/ but no train/: expected {EXPECTED}"
        )
    refuse_other_layouts(root, [path.name for path in folders])
    return {"train": root}


def _beside(root: Path, folders: Mapping[str, Path]) -> list[LeftOut]:
    """Return what is in `root` beside the folders of the splits. Folders are not entered."""
    used = list(folders.values())
    if root in used:
        return []
    reason = f"not in {' or '.join(f'{folder.name}/' for folder in used)}"
    left_out = []
    for path in sorted(set(root.iterdir()) - set(used)):
        is_data = path.is_dir() or reason_to_skip(str(path)) is None
        if path.is_symlink() and not path.exists():
            left_out.append(LeftOut(str(path), BROKEN_LINK, is_loss=True))
        elif is_litter(path.name) or not is_data:
            left_out.append(skipped(str(path)))
        else:
            # A split that is kept for later is no loss.
            is_loss = path.name.lower() not in SPLIT_NAMES
            left_out.append(LeftOut(str(path), reason, is_loss, path.is_dir()))
    return left_out


def _refuse_unread_classes(listing: Listing) -> None:
    """Raise DataError if there are files, and no photo, where a class folder is expected."""
    if not listing.photos:
        return
    root = str(listing.folder)
    read = listing.folders
    depth = next(iter(read)).count(os.sep)
    unread = defaultdict[str, list[LeftOut]](list)
    for each in listing.left_out:
        place = os.path.dirname(each.path)
        if each.reason == BROKEN_LINK and not os.path.splitext(each.path)[1]:
            place = each.path  # to the folder of a class
        if each.reason != LITTER and place != root and place.count(os.sep) >= depth:
            unread[os.sep.join(place.split(os.sep)[: depth + 1])].append(each)
    names = sorted({os.path.basename(place) for place in (*read, *unread)})
    refuse_other_layouts(listing.folder, names)
    for place in sorted(unread.keys() - read):
        first = unread[place][0]
        what = f"{place} ({first.reason})"
        if first.path != place:
            count = counted(len(unread[place]), "folder" if first.is_folder else "file")
            name = os.path.relpath(first.path, place)
            what = f"of {count} in {place}, the first is {name} ({first.reason})"
        fact = f"no photo of class {os.path.basename(place)} can be read: {what}"
        raise DataError("DATA_CLASS_UNREAD", f"{fact}: replace it, or move {place} elsewhere")


def _refuse_single_class(found: SplitFolders, folder: str, num_photos: int) -> None:
    """Raise DataError for photos in one folder, where there is nothing to tell apart."""
    kind = "no class folder" if folder == "." else f"the same class folder ({folder})"
    fact = f"all {num_photos} photos of {found.root} are in {kind}"
    files = (each.path for each in [*found.left_out, *found.beside])
    table = next((path for path in files if os.path.splitext(path)[1].lower() in TABLES), None)
    if table is None:
        fix = "make a folder per class, give the one above, or add metadata.csv (file_name, label)"
        raise DataError("DATA_NO_CLASSES", f"{fact}: {fix}")
    fix = "save it beside them as metadata.csv, with the columns file_name and label"
    raise DataError("DATA_NO_CLASSES", f"{fact}: if {table} lists their classes, {fix}")


def _refuse_archives(found: SplitFolders) -> None:
    """Raise DataError if a zip among the photos holds photos, because it would not be read."""
    for path in (each.path for each in found.left_out):
        if not (path.lower().endswith(".zip") and os.path.isfile(path)):
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.namelist()
        except (OSError, zipfile.BadZipFile):
            continue
        if any(reason_to_skip(name) is None for name in members):
            fact = f"{found.root} has photos and an archive of photos ({path})"
            raise DataError("DATA_ARCHIVE", f"{fact}: extract it, or move it to a different folder")
