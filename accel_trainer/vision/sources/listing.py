"""Lists the photos below a folder, and gives a reason for every file that is left out.

All readers of folders use this list, so a run, `data` and `predict` see the same files.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import DataError
from ..data.photo_decode import photo_suffixes

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of the files that describe photos by `file_name`."""

LITTER = "a file of the system or of a tool"
"""The reason of files that are no data."""

# In small letters. A name is compared as a whole: `.net` and `__background__` are classes.
_LITTER_NAMES = (
    ".appledouble .cache .directory .documentrevisions-v100 .ds_store .dvc .dvcignore .fseventsd "
    ".git .gitattributes .gitignore .gitkeep .gitmodules .hg .huggingface .idea .ipynb_checkpoints "
    ".keep .localized .nomedia .picasa.ini .spotlight-v100 .svn .temporaryitems .thumbnails .trash "
    ".trashes .venv .vscode @eadir #recycle $recycle.bin __macosx __pycache__ desktop.ini "
    "ehthumbs.db lost+found picasa.ini thumbs.db"
)
_LITTER = frozenset(_LITTER_NAMES.split()) | {"system volume information"}
_TRASH_OF_A_USER = re.compile(r"\.trash-\d+")
_UNREAD_SUFFIXES = (
    ".3fr .arw .avif .cr2 .cr3 .crw .dcm .dng .emf .erf .exr .hdr .heic .heics .heif .heifs .hif "
    ".jp2 .jpx .jxl .jxr .kdc .mef .mos .mpo .mrw .nef .nrw .orf .pef .psb .psd .raf .raw .rw2 "
    ".rwl .sr2 .srf .srw .svg .svgz .wmf .x3f .xcf"
)

_BROKEN_LINK = "a broken link: restore its target, or remove it"
_FOLDER_LINK = "links to folders are only followed at the top: move it up"
_SPECIAL = "not a regular file"
_MAX_LINES = 10


class LeftOut(NamedTuple):
    """A file that is not read, or a folder with all that is in it, and the reason.

    `is_loss`: it looks like data, so a run warns of it.
    """

    path: str
    reason: str
    is_loss: bool = False
    is_folder: bool = False


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files below a folder, in order: each is in one of these lists.

    `metadata` are those that describe photos, if it has any.
    """

    folder: Path
    photos: list[str] = field(default_factory=list)
    metadata: list[Path] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def list_photos(folder: Path) -> Listing:
    """Return the photos below a folder, and what is left out.

    Links to folders are followed in `folder` itself, and not below.

    Raises DataError for a folder that cannot be listed, and a link to a folder that it lies in.
    """
    listing = Listing(folder=folder)
    is_described = has_metadata(folder)
    for entry in _entries_below(folder):
        if entry.reason:
            listing.left_out.append(entry)
        elif is_described and os.path.basename(entry.path) in METADATA:
            listing.metadata.append(Path(entry.path))
        elif reason_to_skip(entry.path) is None:
            listing.photos.append(entry.path)
        else:
            listing.left_out.append(skipped(entry.path))
    return listing


def images_at(paths: Sequence[str]) -> Any:
    """Return an Arrow array of images as `datasets` has them: paths, without the bytes."""
    import pyarrow as pa

    no_bytes = pa.nulls(len(paths), pa.binary())
    return pa.StructArray.from_arrays(
        [no_bytes, pa.array(paths, pa.string())], names=["bytes", "path"]
    )


def has_metadata(folder: Path) -> bool:
    """Return whether a file in `folder` describes its photos."""
    return any((folder / name).is_file() for name in METADATA)


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in `folder`, sorted, without litter."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_litter(path.name))


def is_litter(name: str) -> bool:
    """Return whether systems and tools leave files or folders of this name, which are no data."""
    return name.lower() in _LITTER or _TRASH_OF_A_USER.fullmatch(name.lower()) is not None


def reason_to_skip(path: str) -> str | None:
    """Return why a file of this name is no photo that is read; None: it is one."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in photo_suffixes():
        return None
    if suffix in _unread_suffixes():
        return f"{suffix} is not read: convert it to JPEG or PNG"
    return f"{suffix} is not a photo" if suffix else "its name has no suffix"


def skipped(path: str) -> LeftOut:
    """Return a file that is no photo, with the reason."""
    is_image = os.path.splitext(path)[1].lower() in _unread_suffixes()
    return LeftOut(path, reason_to_skip(path) or "", is_image)


@cache
def _unread_suffixes() -> frozenset[str]:
    from PIL import Image

    known = {*_UNREAD_SUFFIXES.split(), *Image.registered_extensions()}
    return frozenset(known - photo_suffixes() - {".pdf", ".ps", ".mpg", ".mpeg"})


def _entries_below(folder: Path) -> Iterator[LeftOut]:
    """Yield the files below a folder, sorted, then those below each link to a folder in it.

    The reason of a file that can be read is empty.
    """
    real = folder.resolve()
    links = [path for path in subfolders(folder) if path.is_symlink()]
    for link in links:
        if real.is_relative_to(link.resolve()):
            fact = f"{link} links back to {link.resolve()}, a folder that contains it"
            raise DataError("DATA_LINK", f"{fact}: remove it")
    found = _scan(str(folder))
    followed = {str(link) for link in links}
    yield from sorted(entry for entry in found if entry.path not in followed)
    for link in links:
        yield from sorted(_scan(str(link)))


def _scan(start: str) -> list[LeftOut]:
    """Return the files below a folder, in any order, and the folders that are not entered."""
    found = []
    waiting = [start]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                listed = list(entries)
        except OSError as error:
            fact = f"{place} cannot be listed ({error.strerror})"
            raise DataError(
                "DATA_NOT_READABLE", f"{fact}: give this user permission to read it"
            ) from error
        names = {entry.name for entry in listed}
        if place != start and all(map(is_litter, names)):
            found.append(LeftOut(place, "empty", is_loss=True, is_folder=True))
        for entry in listed:
            is_folder = entry.is_dir(follow_symlinks=False)
            reason = _reason_against(entry, names, is_folder=is_folder)
            if is_folder and not reason:
                waiting.append(entry.path)
            else:
                is_loss = reason not in ("", LITTER)
                is_folder = is_folder or reason == _FOLDER_LINK
                found.append(LeftOut(entry.path, reason, is_loss, is_folder))
    return found


def _reason_against(entry: os.DirEntry[str], names: set[str], *, is_folder: bool) -> str:
    """Return why a file is not read or a folder not entered; empty: it is.

    `names` are those beside it: macOS leaves `._1.jpg` beside `1.jpg`.
    """
    if is_litter(entry.name) or (entry.name.startswith("._") and entry.name[2:] in names):
        return LITTER
    if is_folder or os.path.isfile(entry):
        return ""
    if os.path.isdir(entry):
        return _FOLDER_LINK
    return _BROKEN_LINK if entry.is_symlink() else _SPECIAL


def no_data(left_out: Iterable[LeftOut]) -> list[LeftOut]:
    """Return what is neither a loss nor litter: a run prints it, and does not warn of it."""
    return [each for each in left_out if not each.is_loss and each.reason != LITTER]


def describe_left_out(left_out: Iterable[LeftOut]) -> list[str]:
    """Return a line for each folder, such as a class, and reason."""
    groups = defaultdict[tuple[str, str, bool], list[str]](list)
    for path, reason, _, is_folder in left_out:
        groups[os.path.dirname(path), reason, is_folder].append(path)
    lines = []
    for (place, reason, is_folder), paths in groups.items():
        noun = "folder" if is_folder else "file"
        count = f"{len(paths):,} {noun}{'s' * (len(paths) > 1)}"
        first = os.path.basename(paths[0]) + ", ..." * (len(paths) > 1)
        lines.append(f"left out of {place}: {count} ({reason}): {first}")
    return lines


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines that a run prints: of many, the first, and how many more there are."""
    num_more = len(lines) - _MAX_LINES
    more = [f"and {num_more:,} more such lines, which accel-trainer data prints"]
    return [*lines[:_MAX_LINES], *more] if num_more > 1 else list(lines)
