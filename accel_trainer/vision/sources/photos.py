"""Photos of any size, encoded, from everything that Hugging Face's `datasets` reads.

Shapes: N samples, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...core.config import short_flag
from ...core.errors import ConfigError, DataError
from ...data.fingerprint import SAMPLED
from ..data.eval_transform import EvalTransform
from ..data.photo_decode import decoder_version
from ..data.pixel_range import FormatRanges
from ..models.timm_nets import input_settings
from .labels import Split
from .layouts import VAL_NAMES
from .notes import facts_about, warnings_about
from .photo_columns import ImageColumn, read_columns
from .photo_files import open_dataset, opened

_NUM_HASHED = 256
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PhotoConfig:
    """Which columns and which part of the data to use, and the size of the model's input."""

    image_column: Annotated[str | None, short_flag("--image-column")] = None
    """The column with the photos; None: the one called image, or the only one with images."""
    label_column: Annotated[str | None, short_flag("--label-column")] = None
    """The column with the classes; None: the one called label, or the only one with classes."""
    val_fraction: Annotated[float, short_flag("--val-fraction")] = 0.0
    """The fraction (0..1) of the photos to evaluate on, for data without a validation split."""
    image_size: Annotated[int, short_flag("--image-size")] = 224
    """Height and width in pixels of the model's input."""
    crop_ratio: float | None = None
    """The side of the centre crop in evaluation, as a fraction (0..1) of a photo's shorter side;
    None: as for the weights of a timm model, else 0.875."""

    def __post_init__(self) -> None:
        _check_fraction(self.val_fraction)
        if self.image_size is not None:  # left open, until the photos are known
            self.eval_transform()

    def eval_transform(self, model: nn.Module | None = None) -> EvalTransform:
        """Return how photos are evaluated: with a timm model as in its pretraining, at our size."""
        settings = dict(input_settings(model)) if model is not None else {}
        if self.crop_ratio is not None:
            settings["crop_ratio"] = self.crop_ratio
        return EvalTransform(size=self.image_size, **settings)


@dataclass(frozen=True, kw_only=True)
class PhotoSplit:
    """The labels and the encoded photos of a split.

    Labels are int64 [N] below K; if photos have several labels, float32 [N, K] of 0 and 1.
    `encoded_at(index)` reads a file as bytes, from any thread; `name_of(index)` describes where it
    is, for messages.
    """

    labels: NDArray[Any]
    encoded_at: Callable[[int], bytes]
    name_of: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Photos:
    """A training and a validation split of labelled photos.

    `fingerprint` is a hash of all labels, the class names, the decoder's version and some photos of
    each split. `notes` are warnings, such as files that are left out, classes without a validation
    photo, and photos that are almost black. `facts` are lines that a run prints at its start, such
    as which columns are used.
    """

    train: PhotoSplit
    val: PhotoSplit
    class_names: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)


def load_photos(
    source: Any,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    val_fraction: float = 0.0,
    multi_label: bool = False,
    cache_dir: Path | None = None,
) -> Photos:
    """Return the photos of a folder, a name on the hub, a `datasets.Dataset` or a `DatasetDict`.

    A few photos are decoded, to see which range their pixels use. The columns are found by their
    names, or else by their types, unless they are given; classes of different tables are matched by
    name. If the source has no validation split, `val_fraction` (0..1) of the photos are set aside:
    a hash of a photo's name decides, so that adding photos moves no other. With `multi_label`, the
    column has a list of classes for each photo. `datasets` writes its files about local data below
    `cache_dir`; None: in its default cache.

    Raises:
        ConfigError: a column does not exist, or the fraction cannot be used.
        DataError: there are no photos, no labels, or no validation split.
    """
    _check_fraction(val_fraction)
    is_path = isinstance(source, str | Path)
    name = str(source) if is_path else "the dataset"
    data = open_dataset(source, cache_dir=cache_dir) if is_path else opened(source, name)
    train, val = train_and_val(data.splits, name)
    if val is None and val_fraction == 0:
        raise DataError(
            "DATA_NO_VAL", f"{name} has no validation split: set one aside with --val-fraction 0.1"
        )
    if val is not None and val_fraction > 0:
        fact = f"{name} has a validation split, so --val-fraction {val_fraction} does not apply"
        raise ConfigError("VAL_FRACTION", f"{fact}: leave it out")
    splits = [train] if val is None else [train, val]
    columns = read_columns(
        splits,
        image_column=image_column,
        label_column=label_column,
        root=Path(source).absolute() if is_path else None,
        multi_label=multi_label,
    )
    images = columns.images
    labels = columns.labels
    class_names = columns.class_names
    if val is None:
        is_val = images[0].name_hashes() < val_fraction
        notes = _notes_on_missing_classes(labels[0], is_val, class_names)
        parts = [_split(images[0], labels[0], np.flatnonzero(side)) for side in (~is_val, is_val)]
    else:
        notes = ()
        parts = [_split(images[side], labels[side], None) for side in (0, 1)]
        refuse_untrained(labels[0], labels[1], class_names, parts[1].name_of)
    for part, kind in zip(parts, ("training", "validation"), strict=True):
        if not len(part):
            raise DataError(
                "DATA_EMPTY", f"{name} has no {kind} photos: add some, or change --val-fraction"
            )
    named = dict(zip(("training", "validation"), parts, strict=True))
    fingerprint, notes_on_pixels = fingerprint_photos(named, columns.names, class_names)
    return Photos(
        train=parts[0],
        val=parts[1],
        class_names=class_names,
        fingerprint=fingerprint,
        notes=(*warnings_about(data, labels, class_names), *notes, *notes_on_pixels),
        facts=facts_about(data, columns, used=splits),
    )


def _check_fraction(val_fraction: float) -> None:
    if not 0 <= val_fraction < 1:
        raise ConfigError(
            "VAL_FRACTION", f"--val-fraction is {val_fraction}: set it to at least 0 and below 1"
        )


def train_and_val(splits: Mapping[str, Split], name: str) -> tuple[Split, Split | None]:
    """Return the splits to train and to evaluate on; the second is None if there is only one."""
    train_name = "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
    if train_name not in splits:
        fact = f"{name} has the splits {', '.join(splits) or '(none)'}"
        raise DataError("DATA_NO_TRAIN", f"{fact}: rename the one to train on to train")
    val_name = next((key for key in VAL_NAMES if key in splits and key != train_name), None)
    return splits[train_name], splits[val_name] if val_name else None


def _split(images: ImageColumn, labels: NDArray[Any], rows: NDArray[np.int64] | None) -> PhotoSplit:
    """Return the photos in `rows`; None: all photos."""
    if rows is None:
        return PhotoSplit(labels=labels, encoded_at=images.encoded_at, name_of=images.name_of)
    return PhotoSplit(
        labels=labels[rows],
        encoded_at=partial(_at_row, images.encoded_at, rows),
        name_of=partial(_at_row, images.name_of, rows),
    )


def _at_row(read: Callable[[int], T], rows: NDArray[np.int64], index: int) -> T:
    return read(int(rows[index]))


def _notes_on_missing_classes(
    labels: NDArray[Any], is_val: NDArray[np.bool_], class_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return a line for each part, training or validation, in which classes are missing."""
    notes = []
    for in_part, kind in ((is_val, "validation"), (~is_val, "training")):
        missing = np.setdiff1d(np.arange(len(class_names)), _classes_in(labels[in_part]))
        if missing.size and in_part.any():
            fact = f"no {kind} photo of {_listed(missing, class_names)}"
            notes.append(f"{fact}: add photos of it, or change --val-fraction")
    return tuple(notes)


def refuse_untrained(
    train: NDArray[Any],
    val: NDArray[Any],
    class_names: Sequence[str],
    name_of: Callable[[int], str],
) -> None:
    """Raise DataError if a validation photo is of a class that no training photo has.

    `name_of(index)` describes the validation photo.
    """
    missing = np.setdiff1d(_classes_in(val), _classes_in(train))
    if len(missing):
        has_class = val == missing[0] if val.ndim == 1 else val[:, missing[0]] > 0
        first = name_of(int(np.flatnonzero(has_class)[0]))
        listed = _listed(missing, class_names)
        fact = f"{first} is of class {listed}, which no training photo has"
        raise DataError("DATA_LABEL", f"{fact}: fix the label, or add photos")


def _classes_in(labels: NDArray[Any]) -> NDArray[np.int64]:
    """Return the classes that occur in `labels`."""
    return np.unique(labels) if labels.ndim == 1 else np.flatnonzero(labels.any(0))


def _listed(labels: NDArray[np.int64], class_names: Sequence[str]) -> str:
    names = ", ".join(class_names[label] for label in labels[:5])
    return f"{names} and {len(labels) - 5} other classes" if len(labels) > 5 else names


def fingerprint_photos(
    parts: Mapping[str, PhotoSplit], columns: tuple[str, str], class_names: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Return a hash of labels, names of columns and classes, decoder, and some photos of a part.

    Also returns a line for each part and format whose photos are almost one shade, of those hashed.
    """
    digest = hashlib.sha256(repr((decoder_version(), columns, class_names)).encode())
    notes = []
    for name, part in parts.items():
        digest.update(f"{len(part)} ".encode() + part.labels.tobytes())
        indices = np.linspace(0, len(part) - 1, min(_NUM_HASHED, len(part))).astype(int)
        ranges = FormatRanges()
        for index in indices.tolist():
            data = part.encoded_at(index)
            digest.update(hashlib.sha256(data).digest())
            ranges.look_at(data, part.name_of(index))
        notes += ranges.notes(f"{name} photos")
    return f"{SAMPLED}{digest.hexdigest()}", notes
