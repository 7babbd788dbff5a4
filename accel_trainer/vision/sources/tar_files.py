"""Checks tars before `datasets` reads them, and reads tars of class folders.

`datasets` reads webdataset: the members of a sample follow each other and have one name up to the
first dot, such as 0001.jpg and 0001.cls.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import DataError, listed
from .class_names import numbers_in
from .layouts import SPLIT_NAMES, train_and_val_in
from .listing import LITTER, LeftOut, Listing, is_litter, reason_to_skip, skipped
from .photo_folders import SplitFolders, class_of, everything_left_out, find_classes
from .raw import Opened, Table
from .stamps import cache_of

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
                place = f"{path}/{name}"
                *folders, file = name.split("/")
                if any(map(is_litter, (*folders, file))) or file.startswith("._"):
                    left_out.append(LeftOut(place, LITTER))
                elif "." not in file and not info.isdir():
                    left_out.append(LeftOut(place, "its name has no suffix"))
                elif info.isfile() and not info.issparse():
                    members.append(Member(name, info.offset_data, info.size))
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
    samples = {stem for name in photos for stem in (_key(name), posixpath.splitext(name)[0])}
    has_labels = any(_key(name) in samples for name in names if reason_to_skip(name) is not None)
    return bool(photos) and not has_labels and all("/" in _plain(name) for name in photos)


def check_samples(tar: TarIndex) -> None:
    """Raise DataError if `datasets` would not group the members of a tar into samples."""
    samples: dict[str, list[str]] = {}
    for key, group in groupby((member.name for member in tar.members), _key):
        names = list(group)
        if key in samples:
            both = f"{samples[key][-1]} and {names[0]}"
            fact = f"members of one sample of {tar.path} are not adjacent ({both})"
            raise DataError("DATA_TAR", f"{fact}: write it again with tar --sort=name")
        samples[key] = names
    if not samples:
        return
    first, expected = next(iter(samples.items()))
    kinds = [name.removeprefix(first) for name in expected]
    for key, names in samples.items():
        found = [name.removeprefix(key) for name in names]
        photos = [kind for kind in found if "." in kind[1:] and reason_to_skip(kind) is None]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError("DATA_TAR", f"{tar.path} has {twice[0]} twice: remove one")
        if len({posixpath.splitext(name)[1] for name in photos}) < len(photos):
            fact = f"{tar.path} has the photos {listed(photos)} in one sample ({key})"
            raise DataError("DATA_TAR", f"{fact}: {_DOTS}")
        if set(found) != set(kinds):
            fact = (
                f"{tar.path} has {listed(expected)} for one sample, but {listed(names)} for another"
            )
            has_dots = any("." in kind[1:] for kind in (*kinds, *found))
            fix = _DOTS if has_dots else "give each sample the same kinds of files"
            raise DataError("DATA_TAR", f"{fact}: {fix}")
    if all(reason_to_skip(name) is None for name in expected):
        fact = f"{tar.path} has no labels: the first sample only has {expected[0]}"
        fix = f"add label files as in webdataset ({_SIDECAR_EXAMPLE}), or use class folders"
        raise DataError("DATA_TAR", f"{fact}: {fix}")


def _key(name: str) -> str:
    """Return the part of a name before the first dot of the file's own name."""
    folder, file = posixpath.split(name)
    return posixpath.join(folder, file.partition(".")[0])


def _plain(name: str) -> str:
    return posixpath.normpath(name)


def read_class_tars(
    splits: Mapping[str, Sequence[TarIndex]], root: Path, name: str, cache_dir: Path | None
) -> Opened:
    """Return the photos of tars whose folders are classes."""
    from datasets import ClassLabel, Dataset, Features, Image

    members = {
        f"{tar.path}/{_plain(member.name)}": (str(tar.path), member.offset, member.size)
        for tars in splits.values()
        for tar in tars
        for member in tar.members
    }
    found = _list_members(splits, root)
    names = find_classes(found)
    features = Features({"image": Image(decode=False), "label": ClassLabel(names=list(names))})
    tables = {}
    for split, listing in found.splits.items():
        labels = numbers_in(names, list(map(class_of, listing.photos))).tolist()
        labelled = zip(listing.photos, labels, strict=True)
        rows = [(path, *members[path], label) for path, label in labelled]
        dataset = Dataset.from_generator(
            _rows,
            features=features,
            cache_dir=cache_of(sorted({tar for _, tar, *_ in rows}), cache_dir),
            gen_kwargs={"rows": [rows]},
        )
        tables[split] = [Table(dataset, name)]
    return Opened(splits=tables, left_out=everything_left_out(found))


def _rows(rows: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the photos of tars with their labels."""
    for path, tar, offset, size, label in rows[0]:
        with open(tar, "rb") as file:
            file.seek(offset)
            yield {"image": {"bytes": file.read(size), "path": path}, "label": label}


def _list_members(splits: Mapping[str, Sequence[TarIndex]], root: Path) -> SplitFolders:
    """Return the members as a listing of folders, in which each tar is a folder.

    Folders `train` and `val` in the tars are the splits, if the tars are not named after splits.
    """
    listings = {}
    for name, tars in splits.items():
        paths = sorted({f"{tar.path}/{_plain(each.name)}" for tar in tars for each in tar.members})
        left_out = [each for tar in tars for each in tar.left_out]
        listings[name] = Listing(
            folder=root,
            photos=[path for path in paths if reason_to_skip(path) is None],
            left_out=[*left_out, *(skipped(path) for path in paths if reason_to_skip(path))],
        )
    if len(listings) == 1:
        (only,) = listings.values()
        inner = defaultdict[str, list[str]](list)
        for path in only.photos:
            inner[_inner_split(path)].append(path)
        train, val = train_and_val_in(inner)
        if train and val and "" not in inner:
            listings = {
                "train": Listing(folder=root, photos=train, left_out=only.left_out),
                "validation": Listing(folder=root, photos=val),
            }
    return SplitFolders(root=root, splits=listings)


def _inner_split(path: str) -> str:
    """Return the folder of a split that a member of a tar is in, if any."""
    folders = path.lower().partition(".tar/")[2].split("/")[:-2]
    return next((each for each in folders if each in SPLIT_NAMES), "")
