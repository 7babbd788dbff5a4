"""Checks tars before `datasets` reads them, and reads tars of class folders.

`datasets` reads webdataset: the members of a sample follow each other and have one name up to the
first dot, such as 0001.jpg and 0001.cls.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import DataError, listed
from .labels import Part
from .layouts import TRAIN_NAMES, VAL_NAMES
from .listing import LITTER, LeftOut, Listing, is_litter, reason_to_skip
from .photo_folders import SplitFolders, class_of, everything_left_out, find_classes

_BLOCK = 512
_DOTS = "the name of a sample ends at its first dot, so replace dots in names by _"
_SIDECAR_EXAMPLE = "0001.jpg with 0001.cls"


class Member(NamedTuple):
    """A file in a tar: its place in the archive, and its size in bytes."""

    name: str
    offset: int
    size: int


class TarIndex(NamedTuple):
    """The files in a tar, in order, and what is left out of it."""

    path: Path
    members: list[Member]
    left_out: list[LeftOut]


def index_tar(path: Path) -> TarIndex:
    """Return what is in a tar. Raises DataError if it is cut or damaged."""
    members = []
    left_out = []
    name = "its start"
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                name = info.name
                place = f"{path}/{info.name}"
                parts = info.name.split("/")
                if any(map(is_litter, parts)) or parts[-1].startswith("._"):
                    left_out.append(LeftOut(place, LITTER))
                elif "." not in parts[-1] and not info.isdir():
                    left_out.append(LeftOut(place, "its name has no suffix"))
                elif info.isfile() and not info.issparse():
                    members.append(Member(info.name, info.offset_data, info.size))
                elif not info.isdir():
                    left_out.append(LeftOut(place, "a link or a special file", is_loss=True))
            end = tar.offset
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _damaged(path, f"{error} after {name}") from error
    _check_end(path, end, name)
    return TarIndex(path, members, left_out)


def _damaged(path: Path, what: str) -> DataError:
    return DataError("DATA_DAMAGED", f"{path} is damaged ({what}): copy or create it again")


def _check_end(path: Path, start: int, name: str) -> None:
    """Raise DataError unless zeros, and nothing else, follow the last member of a tar."""
    with path.open("rb") as file:
        file.seek(start)
        rest = file.read(_BLOCK)
        if len(rest) < _BLOCK:
            raise _damaged(path, f"it is truncated after {name}: its end marker is missing")
        while rest:
            if rest.strip(b"\0"):
                raise _damaged(path, f"there is data after its end marker, which follows {name}")
            rest = file.read(1 << 20)


def has_class_folders(tars: Sequence[TarIndex]) -> bool:
    """Return whether the tars hold photos in folders, and nothing that would be their labels."""
    names = [member.name for tar in tars for member in tar.members]
    photos = [name for name in names if reason_to_skip(name) is None]
    stems = {posixpath.splitext(name)[0] for name in photos}
    has_labels = any(
        reason_to_skip(name) is not None and _key(name) in stems | {_key(each) for each in photos}
        for name in names
    )
    return bool(photos) and not has_labels and all("/" in _plain(name) for name in photos)


def check_samples(tar: TarIndex) -> None:
    """Raise DataError if `datasets` would not group the members of a tar into samples."""
    seen: dict[str, str] = {}
    fields: dict[str, list[str]] = {}
    current = None
    for name in (member.name for member in tar.members):
        key = _key(name)
        if key != current and key in seen:
            pair = f"{seen[key]} and {name}"
            fact = f"members of one sample of {tar.path} are not adjacent ({pair})"
            raise DataError("DATA_TAR", f"{fact}: write it again with tar --sort=name")
        field = name[len(key) + 1 :]
        if field in fields.setdefault(key, []):
            raise DataError("DATA_TAR", f"{tar.path} has {name} twice: remove one")
        seen[key] = name
        fields[key].append(field)
        current = key
    if not fields:
        return
    first, expected = next(iter(fields.items()))
    for key, found in fields.items():
        dotted = [each for each in found if "." in each and reason_to_skip(each) is None]
        if len({posixpath.splitext(each)[1] for each in dotted}) < len(dotted):
            fact = f"{tar.path} has the photos {listed(dotted)} in one sample ({key})"
            raise DataError("DATA_TAR", f"{fact}: {_DOTS}")
        if set(found) != set(expected):
            raise _uneven(tar, f"{first}.{expected[0]}", expected, f"{key}.{found[0]}", found)
    if all(reason_to_skip(f"x.{field}") is None for field in expected):
        fact = f"{tar.path} has no labels: the first sample only has {first}.{expected[0]}"
        fix = f"add label files as in webdataset ({_SIDECAR_EXAMPLE}), or use class folders"
        raise DataError("DATA_TAR", f"{fact}: {fix}")


def _uneven(
    tar: TarIndex, first: str, expected: Sequence[str], name: str, found: Sequence[str]
) -> DataError:
    fact = f"{tar.path} has {listed(expected)} for {first}, but {listed(found)} for {name}"
    fix = "give each sample the same kinds of files"
    if any("." in field for field in (*expected, *found)):
        fix = _DOTS
    return DataError("DATA_TAR", f"{fact}: {fix}")


def _key(name: str) -> str:
    """Return the part of a name before the first dot of the file's own name."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}" if folder else file.partition(".")[0]


def _plain(name: str) -> str:
    return posixpath.normpath(name)


def read_class_tars(
    splits: Mapping[str, Sequence[TarIndex]], root: Path, name: str, cache_dir: str | None
) -> tuple[dict[str, list[Part]], list[LeftOut]]:
    """Return the photos of tars whose folders are classes, and what is left out."""
    from datasets import ClassLabel, Dataset, Features, Image

    members = {
        f"{tar.path}/{_plain(member.name)}": (str(tar.path), member)
        for tars in splits.values()
        for tar in tars
        for member in tar.members
    }
    found = _list_members(splits, root)
    names = find_classes(found)
    features = Features({"image": Image(decode=False), "label": ClassLabel(names=list(names))})
    parts = {}
    for split, listing in found.splits.items():
        rows = [
            (path, members[path][0], *members[path][1][1:], names.index(class_of(path)))
            for path in listing.photos
        ]
        stamps = sorted({(tar, os.stat(tar).st_mtime_ns) for _, tar, *_ in rows})
        dataset = Dataset.from_generator(
            _rows,
            features=features,
            cache_dir=cache_dir,
            gen_kwargs={"rows": [rows], "stamps": [stamps]},
        )
        parts[split] = [Part(dataset, name)]
    return parts, everything_left_out(found)


def _rows(rows: list[Any], stamps: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the photos of tars with their labels. A change of `stamps` makes the cache invalid."""
    for path, tar, offset, size, label in rows[0]:
        with open(tar, "rb") as file:
            file.seek(offset)
            yield {"image": {"bytes": file.read(size), "path": path}, "label": label}


def _list_members(splits: Mapping[str, Sequence[TarIndex]], root: Path) -> SplitFolders:
    """Return the members as a listing of folders, each tar a folder of its name.

    Folders `train` and `val` in the tars are the splits, if the names of the tars are of no split.
    """
    listings = {name: Listing(folder=root) for name in splits}
    for name, tars in splits.items():
        for tar in tars:
            listings[name].left_out.extend(tar.left_out)
            for member in tar.members:
                path = f"{tar.path}/{_plain(member.name)}"
                reason = reason_to_skip(path)
                if reason is None:
                    listings[name].photos.append(path)
                else:
                    listings[name].left_out.append(LeftOut(path, reason))
            listings[name].photos.sort()
    if len(listings) == 1:
        (only,) = listings.values()
        inner = defaultdict[str, list[str]](list)
        for path in only.photos:
            inner[_inner_split(path)].append(path)
        train = next((inner[name] for name in TRAIN_NAMES if name in inner), None)
        val = next((inner[name] for name in VAL_NAMES if name in inner), None)
        if train and val and "" not in inner:
            listings = {
                "train": Listing(folder=root, photos=train, left_out=only.left_out),
                "validation": Listing(folder=root, photos=val),
            }
    return SplitFolders(root=root, splits=listings)


def _inner_split(path: str) -> str:
    """Return the folder of a split that a member of a tar is in, if any."""
    folders = path.partition(".tar/")[2].split("/")[:-2]
    return next(
        (each.lower() for each in folders if each.lower() in (*TRAIN_NAMES, *VAL_NAMES)), ""
    )
