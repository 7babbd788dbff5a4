"""Loads the labelled images that a stored model is evaluated on.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.errors import ConfigError, DataError, shortened
from ...core.logger import logger
from ...data.loader import EvalLoader
from ...vision import ImageReader, PhotoReader, PhotoSplit, load_images, load_photos
from ...vision.data.bad_images import WHATEVER_WAS_KEPT
from ...vision.pretrained import ExportConfig
from ...vision.sources.class_names import Integers, Names, check_class_names, numbers_in
from ...vision.sources.layouts import VAL_NAMES
from ...vision.sources.photo_splits import load_splits


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """Which data to evaluate on."""

    dataset: str
    split: str | None
    """The split; None: the one that the run evaluated on, else the one a run would evaluate on,
    else the only one."""
    image_column: str | None = None
    label_column: str | None = None
    of_run: Mapping[str, Any] | None = None
    """The `photos` settings of a run on this dataset: its columns and its validation fraction."""
    cache_dir: Path


class EvalData(NamedTuple):
    """The images of a split and their labels [N], numbered as the classes of the model.

    `fingerprint` is the hash that a run on this data records (None: a run would not evaluate on
    this split).
    """

    loader: EvalLoader[ImageReader] | EvalLoader[PhotoReader]
    labels: Integers
    split: str
    fingerprint: str | None


def load_eval_data(
    choice: DataChoice,
    config: ExportConfig,
    *,
    batch_size: int,
    num_workers: int,
    device: torch.device,
) -> EvalData:
    """Return the data for a model whose input is described by `config`.

    Raises:
        ConfigError: there is no such split.
        DataError: the data cannot be read, has a class that the model does not have, or does not
            fit the model.
    """
    if config.transform is not None:
        photos, names, split_name, fingerprint = _load_photos(choice)
        labels = _labels_of_model(photos.labels, names, config.class_names, choice.dataset)
        photo_reader = PhotoReader(
            replace(photos, labels=labels),
            transform=config.transform,
            device=device,
            num_workers=num_workers,
        )
        photo_loader = EvalLoader(photo_reader, batch_size=batch_size, device=device)
        return EvalData(photo_loader, labels, split_name, fingerprint)
    images = load_images(choice.dataset, cache_dir=choice.cache_dir, bad_images=WHATEVER_WAS_KEPT)
    _warn(images.notes)
    split_name = choice.split or "test"
    if split_name not in ("train", "test"):
        raise ConfigError(
            "DATA_SPLIT", f"no split {split_name} of {choice.dataset}: set --split to train or test"
        )
    split = images.train if split_name == "train" else images.test
    expected = (config.in_channels, *(config.image_size or images.image_size))
    found = tuple(split.images.shape[1:])
    if found != expected:
        fact = (
            f"{choice.dataset} has images of (C, H, W) = {found}, "
            f"the model was trained on {expected}"
        )
        raise DataError("DATA_IMAGE_SIZE", f"{fact}: convert them, or choose a different --dataset")
    labels = _labels_of_model(
        split.labels.numpy(), images.class_names, config.class_names, choice.dataset
    )
    reader = ImageReader(
        replace(split, labels=torch.from_numpy(labels), num_classes=len(config.class_names)),
        normalization=config.normalization,
        device=device,
    )
    loader = EvalLoader(reader, batch_size=batch_size, device=device)
    fingerprint = images.fingerprint if split is images.test else None
    return EvalData(loader, labels, split_name, fingerprint)


def _load_photos(choice: DataChoice) -> tuple[PhotoSplit, Names, str, str | None]:
    """Return the photos, their class names, the name of their split, and a run's fingerprint."""
    columns: dict[str, Any] = {
        name: getattr(choice, name) or (choice.of_run or {}).get(name)
        for name in ("image_column", "label_column")
    }
    if choice.split is None and choice.of_run is not None:
        fraction = float(choice.of_run.get("val_fraction") or 0.0)
        try:
            photos = load_photos(
                choice.dataset, **columns, val_fraction=fraction, cache_dir=choice.cache_dir
            )
        except (ConfigError, DataError) as error:
            if error.code not in ("DATA_NO_VAL", "VAL_FRACTION"):
                raise
            fact = f"{choice.dataset} no longer has the validation split that the run was given"
            raise DataError(
                "DATA_SPLIT", f"{fact}: choose what to evaluate on with --split"
            ) from None
        _warn(photos.notes)
        return photos.val, photos.class_names, "validation", photos.fingerprint
    found = load_splits(choice.dataset, **columns, cache_dir=choice.cache_dir)
    _warn(found.notes)
    name = choice.split or next((name for name in VAL_NAMES if name in found.splits), None)
    if name is None and len(found.splits) == 1:
        (name,) = found.splits
    if name is None or name not in found.splits:
        wanted = "no --split" if name is None else f"no split {name}"
        listed = ", ".join(found.splits)
        raise ConfigError(
            "DATA_SPLIT", f"{wanted} of {choice.dataset}: set --split to one of {listed}"
        )
    return found.splits[name], found.class_names, name, None


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        logger.warning("%s", note)


def _labels_of_model(
    labels: Integers, names: Sequence[str], of_model: Sequence[str], dataset: str
) -> Integers:
    """Return the labels [N] with the model's numbers of the classes, which are matched by name."""
    if tuple(names) == tuple(of_model):
        return labels
    check_class_names((*of_model, *names), f"the model or {dataset}")
    numbers = numbers_in(of_model, names)
    unknown = [names[label] for label in np.unique(labels) if numbers[label] < 0]
    if unknown:
        raise DataError(
            "DATA_CLASSES",
            f"{dataset} has classes that the model does not have ({shortened(unknown)}): "
            f"the model has {shortened(of_model)}",
        )
    return numbers[labels]
