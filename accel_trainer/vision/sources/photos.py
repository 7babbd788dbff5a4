"""Photos of any size, encoded, from everything that Hugging Face's `datasets` reads.

Shapes: N samples, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...core.config import Config, short_flag
from ...core.errors import ConfigError, DataError, shortened
from ...data.fingerprint import SAMPLED
from ..data.eval_transform import EvalTransform
from ..data.photo_decode import decoder_version
from ..data.pixel_range import PixelRanges
from ..models.timm_nets import input_settings
from .class_names import Integers, Names
from .held_out import may_be_held_out, set_aside, train_and_val
from .links import notes_on_links, refuse_two_classes
from .notes import facts_about, warnings_about
from .photo_columns import Columns, read_columns
from .photo_files import open_dataset
from .raw import PhotoSplit
from .tables import opened

_NUM_HASHED = 256


@dataclass(frozen=True, kw_only=True)
class PhotoConfig(Config):
    """Which columns and which part of the data to use, and the size of the model's input."""

    image_column: Annotated[str | None, short_flag("--image-column")] = None
    """The column with the photos; None: the one called image, or the only one with images."""
    label_column: Annotated[str | None, short_flag("--label-column")] = None
    """The column with the classes; None: the one called label, or the only one with classes;
    `folder`: the names of the photos' folders, whatever lies beside them."""
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
class Photos:
    """A training and a validation split of labelled photos.

    `fingerprint` is a hash of all labels, the class names, the decoder's version and some photos of
    each split. `notes` are warnings, such as files that are left out, classes without a validation
    photo, and photos that are almost black. `facts` are lines that a run prints at its start, such
    as which columns are used.
    """

    train: PhotoSplit
    val: PhotoSplit
    class_names: Names
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

    A few photos are decoded to find the range of their pixels. Unless the columns are given, they
    are found by name, or else by type; classes of different tables are matched by name. If the
    source has no validation split, `val_fraction` (0..1) of the photos are set aside: a hash of a
    photo's name decides, so that adding photos moves no other. With `multi_label`, the column has a
    list of classes for each photo. `datasets` writes its files about local data below `cache_dir`;
    None: in its default cache.

    Raises:
        ConfigError: a column does not exist, or the fraction cannot be used.
        DataError: there are no photos, no labels, or no validation split.
    """
    _check_fraction(val_fraction)
    if isinstance(source, str | Path):
        name = str(source)
        data = open_dataset(source, cache_dir=cache_dir, label_column=label_column)
    else:
        name = "the dataset"
        data = opened(source, name)
    train, val = train_and_val(data, name)
    beside = list(may_be_held_out(data, train)) if val is None else []
    if val is None and val_fraction == 0:
        only = f", only {'; '.join(beside)}" if beside else ""
        fix = "make it a folder or table val, or " if beside else ""
        fact = f"{name} has no validation split{only}"
        raise DataError("DATA_NO_VAL", f"{fact}: {fix}set one aside with --val-fraction 0.1")
    if val is not None and val_fraction > 0:
        fact = f"{name} has a validation split, so --val-fraction {val_fraction} does not apply"
        raise ConfigError("VAL_FRACTION", f"{fact}: leave it out")
    used = [train] if val is None else [train, val]
    columns = read_columns(
        data,
        used,
        image_column=image_column,
        label_column=label_column,
        multi_label=multi_label,
    )
    refuse_two_classes(columns)
    class_names = columns.class_names
    if val is None:
        splits = _by_kind(set_aside(columns, val_fraction))
        fix = "make it a folder or table val, or rename it"
        notes = [f"{each} may be what to evaluate on, but is ignored: {fix}" for each in beside]
        fix = "add photos of it, or train with a different --val-fraction"
        notes += notes_on_missing_classes([*splits.values()], class_names, fix)
    else:
        splits = _by_kind(columns.splits)
        notes = notes_on_pair(columns)
    for kind, split in splits.items():
        if not len(split):
            raise DataError(
                "DATA_EMPTY",
                f"{name} has no {kind} photos: add some, or train with a different --val-fraction",
            )
    fingerprint, notes_on_pixels = fingerprint_photos(splits, columns.names, class_names)
    return Photos(
        train=splits["training"],
        val=splits["validation"],
        class_names=class_names,
        fingerprint=fingerprint,
        notes=(*warnings_about(data, columns), *notes, *notes_on_pixels),
        facts=facts_about(data, columns, used=used),
    )


def _check_fraction(val_fraction: float) -> None:
    if not 0 <= val_fraction < 1:
        percent = f"; {val_fraction:g}% is {val_fraction / 100:g}" if 1 < val_fraction < 100 else ""
        fact = f"--val-fraction is {val_fraction}"
        raise ConfigError("VAL_FRACTION", f"{fact}: set it to at least 0 and below 1{percent}")


def _by_kind(splits: Sequence[PhotoSplit]) -> dict[str, PhotoSplit]:
    return dict(zip(("training", "validation"), splits, strict=True))


def notes_on_pair(columns: Columns) -> list[str]:
    """Return lines about what the validation photos share with the training photos, and lack.

    Raises DataError if one is of a class that no training photo has.
    """
    refuse_untrained(columns.splits, columns.class_names)
    missing = notes_on_missing_classes(columns.splits, columns.class_names)
    return [*notes_on_links(columns), *missing]


def notes_on_missing_classes(
    splits: Sequence[PhotoSplit],
    class_names: Sequence[str],
    fix: str = "add photos of it, or no number shows whether it is learned",
) -> list[str]:
    """Return a line for each split, of training and validation, in which classes are missing."""
    notes = []
    for kind, split in zip(("validation", "training"), reversed(splits), strict=True):
        missing = np.setdiff1d(np.arange(len(class_names)), _classes_in(split.labels))
        if missing.size and len(split):
            fact = f"no {kind} photo of {shortened([class_names[label] for label in missing])}"
            notes.append(f"{fact}: {fix}")
    return notes


def refuse_untrained(splits: Sequence[PhotoSplit], class_names: Sequence[str]) -> None:
    """Raise DataError if a validation photo is of a class that no training photo has."""
    train, val = splits
    missing = np.setdiff1d(_classes_in(val.labels), _classes_in(train.labels))
    if len(missing):
        is_list = val.labels.ndim == 2
        has_class = val.labels[:, missing[0]] > 0 if is_list else val.labels == missing[0]
        first = val.name_of(int(np.flatnonzero(has_class)[0]))
        listed = shortened([class_names[label] for label in missing])
        fact = f"{first} is of class {listed}, which no training photo has"
        raise DataError("DATA_LABEL", f"{fact}: fix the label, or add photos")


def _classes_in(labels: NDArray[Any]) -> Integers:
    """Return the classes that occur in `labels`."""
    return np.unique(labels) if labels.ndim == 1 else np.flatnonzero(labels.any(0))


def class_at(split: PhotoSplit, index: int, class_names: Sequence[str]) -> str:
    """Return the name of a photo's class, empty if it may have several."""
    return class_names[split.labels[index]] if split.labels.ndim == 1 else ""


def fingerprint_photos(
    splits: Mapping[str, PhotoSplit], columns: tuple[str, str], class_names: Names
) -> tuple[str, list[str]]:
    """Return a hash of labels, names of columns and classes, decoder, and some photos of a split.

    Also returns a line for each split and format with photos of almost one shade, of those hashed.
    """
    digest = hashlib.sha256(repr((decoder_version(), columns, class_names)).encode())
    notes = []
    for name, split in splits.items():
        digest.update(f"{len(split)} ".encode() + split.labels.tobytes())
        indices = np.linspace(0, len(split) - 1, min(_NUM_HASHED, len(split))).astype(int)
        ranges = PixelRanges()
        for index in indices.tolist():
            data = split.encoded_at(index)
            digest.update(hashlib.sha256(data).digest())
            ranges.look_at(data, split.name_of(index), class_at(split, index, class_names))
        notes += ranges.notes(f"{name} photos")
    return f"{SAMPLED}{digest.hexdigest()}", notes
