"""Checks tars before `datasets` reads them.

`datasets` reads webdataset: the members of a sample follow each other and have one name up to the
first dot, such as 0001.jpg and 0001.cls.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ...core.errors import DataError, listed
from .listing import LITTER, LeftOut, is_litter, reason_to_skip

_BLOCK = 512
_DOTS = "the name of a sample ends at its first dot, so replace dots in names by _"


class TarIndex(NamedTuple):
    """The files in a tar, in order, and what is left out of it."""

    path: Path
    members: list[str]
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
                    members.append(name)
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


def check_samples(tar: TarIndex) -> None:
    """Raise DataError if `datasets` would not group the members of a tar into samples."""
    samples: dict[str, list[str]] = {}
    for key, group in groupby(tar.members, _key):
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
        fix = "add label files (0001.jpg with 0001.cls), or if folders are classes, extract it"
        raise DataError("DATA_TAR", f"{fact}: {fix}")


def _key(name: str) -> str:
    """Return the part of a name before the first dot of the file's own name."""
    folder, file = posixpath.split(name)
    return posixpath.join(folder, file.partition(".")[0])
