"""Lists the photos below a folder, and gives a reason for every file that is left out.

All readers of folders use this list, so a run, `data` and `predict` see the same files.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
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

_NUM_BYTES_OF_START = 16
_STARTS_OF_PHOTOS = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|II[*+]\0|MM\0[*+]|GIF8[79]a|BM....\0\0\0\0"
    rb"|P[1-6]\s+[#\d]",
    re.DOTALL,
)
# There may be one of these for each photo.
_SIDECARS = (".csv", ".html", ".json", ".mat", ".md", ".npy", ".txt", ".xml", ".yaml", ".yml")

BROKEN_LINK = "a broken link: restore its target, or remove it"
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

    `inodes` are of the photos, if these are files. `metadata` are the files that describe photos.
    """

    folder: Path
    photos: list[str] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    metadata: list[Path] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @cached_property
    def folders(self) -> set[str]:
        """The paths of the folders that the photos are in."""
        return set(map(os.path.dirname, self.photos))


def list_photos(folder: Path, *, described_by: Sequence[str] = METADATA) -> Listing:
    """Return the photos below a folder, and what is left out.

    If a file in the folder has one of the names `described_by`, all such files are metadata. Links
    to folders are followed in `folder` itself, and not below.

    Raises DataError for a folder that cannot be listed, and a link to a folder that it lies in.
    """
    listing = Listing(folder=folder)
    names = described_by if is_described(folder, by=described_by) else ()
    links = _links_in(folder)
    for start in (str(folder), *links):
        files, others = _scan(start, not_into=links)
        for path, inode in sorted(files):
            if os.path.basename(path) in names:
                listing.metadata.append(Path(path))
            elif reason_to_skip(path) is None or _is_photo_of_odd_name(path):
                listing.photos.append(path)
                listing.inodes.append(inode)
            else:
                others.append(skipped(path))
        listing.left_out.extend(sorted(others))
    return listing


def images_at(paths: Sequence[str]) -> Any:
    """Return an Arrow array of images as `datasets` has them: paths, without the bytes."""
    import pyarrow as pa

    no_bytes = pa.nulls(len(paths), pa.binary())
    return pa.StructArray.from_arrays(
        [no_bytes, pa.array(paths, pa.string())], names=["bytes", "path"]
    )


def is_described(folder: Path, *, by: Sequence[str] = METADATA) -> bool:
    """Return whether a file in `folder` has a name of those that describe photos."""
    return any((folder / name).is_file() for name in by)


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in `folder`, sorted, without litter."""
    with os.scandir(folder) as entries:
        names = sorted(each.name for each in entries if not each.is_file(follow_symlinks=False))
    return [folder / name for name in names if not is_litter(name) and (folder / name).is_dir()]


def is_litter(name: str) -> bool:
    """Return whether systems and tools leave files or folders of this name, which are no data."""
    small = name.lower()
    return small in _LITTER or bool(_TRASH_OF_A_USER.fullmatch(small))


def reason_to_skip(path: str) -> str | None:
    """Return why a file of this name is no photo that is read; None: it is one."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in photo_suffixes():
        return None
    if suffix in _unread_suffixes():
        return f"{suffix} is not read: convert it to JPEG or PNG"
    return f"{suffix} is not a photo" if suffix else "its name has no suffix"


def _is_photo_of_odd_name(path: str) -> bool:
    """Return whether the content of a file is that of a photo, whatever its suffix, if it has any.

    Raw files of cameras begin like TIFF, and a backup lies beside the photo that it is a copy of.
    """
    stem, suffix = os.path.splitext(path)
    if suffix.lower() in (*_SIDECARS, *_unread_suffixes()):
        return False
    originals = {stem, path.removesuffix("~")}
    if any(reason_to_skip(each) is None and os.path.exists(each) for each in originals):
        return False
    try:
        with open(path, "rb") as file:
            return _STARTS_OF_PHOTOS.match(file.read(_NUM_BYTES_OF_START)) is not None
    except OSError:
        return False  # whoever needs it will say so


def skipped(path: str) -> LeftOut:
    """Return a file that is no photo, with the reason."""
    is_image = os.path.splitext(path)[1].lower() in _unread_suffixes()
    return LeftOut(path, reason_to_skip(path) or "", is_image)


@cache
def _unread_suffixes() -> frozenset[str]:
    from PIL import Image

    known = {*_UNREAD_SUFFIXES.split(), *Image.registered_extensions()}
    return frozenset(known - photo_suffixes() - {".pdf", ".ps", ".mpg", ".mpeg"})


def _links_in(folder: Path) -> list[str]:
    """Return the links to folders that are followed. Raises DataError for one that leads back."""
    real = folder.resolve()
    links = [path for path in subfolders(folder) if path.is_symlink()]
    for link in links:
        if real.is_relative_to(link.resolve()):
            fact = f"{link} links back to {link.resolve()}, a folder that contains it"
            raise DataError("DATA_LINK", f"{fact}: remove it")
    return list(map(str, links))


def _scan(start: str, *, not_into: Sequence[str]) -> tuple[list[tuple[str, int]], list[LeftOut]]:
    """Return the files below a folder with their inodes, in any order, and what is left out.

    Only links are looked up: of other entries the folder itself tells what they are, and a call
    for each takes half an hour for a million photos on a network disk.
    """
    files = list[tuple[str, int]]()
    left_out = list[LeftOut]()
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
            left_out.append(LeftOut(place, "empty", is_loss=True, is_folder=True))
        for entry in listed:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_litter(entry.name) or _is_shadow(entry.name, names):
                left_out.append(LeftOut(entry.path, LITTER, is_folder=is_folder))
            elif is_folder:
                waiting.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                files.append((entry.path, entry.inode()))
            elif os.path.isfile(entry):
                files.append((entry.path, os.stat(entry).st_ino))
            elif entry.path not in not_into:
                left_out.append(_closed(entry))
    return files, left_out


def _is_shadow(name: str, beside: set[str]) -> bool:
    """Return whether macOS left this file: `._1.jpg` beside `1.jpg`."""
    return name.startswith("._") and name[2:] in beside


def _closed(entry: os.DirEntry[str]) -> LeftOut:
    """Return a link that leads to no file, or something that is neither a file nor a folder."""
    if os.path.isdir(entry):
        return LeftOut(entry.path, _FOLDER_LINK, is_loss=True, is_folder=True)
    return LeftOut(entry.path, BROKEN_LINK if entry.is_symlink() else _SPECIAL, is_loss=True)


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
