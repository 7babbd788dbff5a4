"""Recognises folders that are not classes, although they lie where class folders do."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ...core.errors import DataError

T = TypeVar("T")

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("validation", "val", "valid", "dev", "test", "testing", "eval", "evaluation")
"""The names of splits to evaluate on; the first that exists is used."""
SPLIT_NAMES = (*TRAIN_NAMES, *VAL_NAMES)
EXPECTED = (
    "train/<class>/*.jpg with or without val/<class>/*.jpg, <class>/*.jpg, metadata.csv, parquet, "
    "or tars"
)
"""What a folder of photos may look like, for messages."""

_WORDS = re.compile(r"(?i:h[eo]ld[\W_]?out)|[A-Z]?[a-z]+|[A-Z]+")
_IMAGE_FOLDERS = "image images img imgs jpegimages photo photos picture pictures rgb"
_MASK_FOLDERS = (
    "annotation annotations depth groundtruth gt label labels mask masks seg segmentation "
    "segmentationclass segmentationobject segmentations"
)
_IMAGES = frozenset(_IMAGE_FOLDERS.split())
_MASKS = frozenset(_MASK_FOLDERS.split())
_FILLERS = _IMAGES | {"data", "dataset", "folder", "set", "split"}
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".xlsx", ".xls", ".txt")


def files_of_splits(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files that are called like a split, or whose folder below `root` is, by split.

    The name may have more words, as in `photos_train-00000-of-00002.parquet`.
    """
    found = defaultdict[str, list[Path]](list)
    for path in files:
        names = (path.stem, *reversed(path.relative_to(root).parent.parts))
        if role := next(filter(None, map(_split_role, names)), None):
            found[role[0]].append(path)
    return dict(found)


def train_and_val_in(found: Mapping[str, T]) -> tuple[T | None, T | None]:
    """Return what is found under the first name of each kind of split; None: under no such name."""
    train, val = (
        next((found[name] for name in names if name in found), None)
        for names in (TRAIN_NAMES, VAL_NAMES)
    )
    return train, val


def refuse_other_layouts(root: Path, names: Sequence[str]) -> None:
    """Raise DataError if `names` of folders are those of splits, or of images and their masks."""
    images = [name for name in names if name.lower() in _IMAGES]
    masks = [name for name in names if name.lower() in _MASKS]
    if images and masks:
        pair = f"{images[0]}/ and {masks[0]}/ look like images and their masks"
        fact = f"{root} has no class folders: {pair}"
        raise DataError("DATA_NO_CLASSES", f"{fact}: expected {EXPECTED}")
    for train, val in _split_pairs(names):
        if not {train.lower(), val.lower()} <= {*SPLIT_NAMES}:
            fact = f"{root} has {train}/ and {val}/, which look like splits, not classes"
            raise DataError("DATA_NOT_RECOGNISED", f"{fact}: rename them to train/ and val/")


def refuse_inner_splits(root: Path, folders: Collection[str]) -> None:
    """Raise DataError if a folder below `root`, above or among the classes, has splits.

    `folders` are those with photos; all of them would be read as one split.
    """
    inside = defaultdict[str, set[str]](set)
    for folder in folders:
        place = os.path.relpath(folder, root)
        while parent := os.path.dirname(place):
            inside[parent].add(os.path.basename(place))
            place = parent
    for parent, names in sorted(inside.items()):
        if pair := next(_split_pairs(sorted(names)), None):
            fact = f"{root / parent} has the splits {pair[0]}/ and {pair[1]}/"
            fix = "give that folder, or make the splits the topmost folders"
            raise DataError("DATA_NOT_RECOGNISED", f"{fact}, below a folder: {fix}")


def refuse_described_splits(root: Path, folders: Collection[str]) -> None:
    """Raise DataError if metadata in `root` makes one split of folders that look like several."""
    places = sorted(os.path.relpath(folder, root) for folder in folders)
    held_out = [place for place in places if any(map(is_held_out, place.split(os.sep)))]
    others = [place for place in places if place not in held_out]
    if held_out and others:
        fact = f"{root} has metadata of {others[0]}/ and {held_out[0]}/, which look like splits"
        fix = "put the rows of each split into a metadata file in its folder, train/ or val/"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: {fix}")


def refuse_unclear_tables(root: Path, splits: Mapping[str, Sequence[Path]]) -> None:
    """Raise DataError if the files of one split look like those of two, or of two datasets.

    The latter are `a/train.parquet` and `b/train.parquet`, the configurations of a hub's dataset.
    """
    for paths in splits.values():
        names = sorted(path.relative_to(root) for path in paths)
        held_out = [path for path in names if looks_held_out(str(path.with_suffix("")))]
        others = sorted({*names} - {*held_out})
        if held_out and others:
            fact = f"{root} has {others[0]} and {held_out[0]}; both would be read as one split"
            fix = "start their names with train and test"
            raise DataError("DATA_NOT_RECOGNISED", f"{fact}: {fix}")
        first = dict[Path, Path]()
        for path in names:
            below = Path(*path.parts[1:])
            other = first.setdefault(below, path)
            if other != path and files_of_splits(Path(), [below]):
                fact = f"{root} has {other} and {path}, which look like two datasets"
                raise DataError("DATA_NOT_RECOGNISED", f"{fact}: give one of their folders")


def looks_held_out(name: str) -> bool:
    """Return whether a word of the name is that of a split to evaluate on, as in `val2`."""
    return any(map(is_held_out, _WORDS.findall(name)))


def is_held_out(name: str) -> bool:
    """Return whether the name is that of a split to evaluate on."""
    plain = re.sub(r"[\W_]", "", name).lower()
    return plain in (*VAL_NAMES, "holdout", "heldout")


def is_of_training(name: str) -> bool:
    """Return whether a word of the name is that of a split to train on."""
    return any(word.lower() in TRAIN_NAMES for word in _WORDS.findall(name))


def _split_pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name of a training split, and the first of validation that is alike otherwise."""
    roles = {name: role for name in names if (role := _split_role(name)) is not None}
    items = list(roles.items())
    vals = {words: name for name, (kind, words) in reversed(items) if kind in VAL_NAMES}
    for train, (kind, words) in items:
        if kind in TRAIN_NAMES and words in vals:
            yield train, vals[words]


def _split_role(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the split that `train_images` or `seg_test` is named after, and the other words.

    None: the name has no word of a split, or two.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    splits = [word for word in words if word in SPLIT_NAMES]
    others = tuple(word for word in words if word not in splits and word not in _FILLERS)
    return (splits[0], others) if len(splits) == 1 else None
