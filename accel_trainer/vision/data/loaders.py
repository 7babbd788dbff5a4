"""The loaders of a run over images that fit in memory, and over photos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...core.logger import logger
from ...data.loader import EvalLoader, TrainLoader, build_eval_loader, build_train_loader
from ...data.order import SampleOrder, choose_order
from ...data.reader import Reader
from ...run.session import Run
from ..augment.batch import AugmentConfig
from ..augment.photo import PhotoAugmentConfig
from ..sources.listing import first_lines
from ..sources.photos import Photos
from .description import describe
from .eval_transform import EvalTransform
from .image_reader import AugmentedImageReader, ImageReader
from .images import ImageDataset, ImageSplit
from .photo_reader import AugmentedPhotoReader, PhotoReader
from .pixel_range import PixelRanges, range_of

_NUM_LOOKED_AT = 256


def build_image_loaders(
    run: Run, images: ImageDataset, *, augment: AugmentConfig
) -> tuple[TrainLoader[AugmentedImageReader], EvalLoader[ImageReader]]:
    """Return the training and the evaluation loader of this process.

    The main process logs the dataset's notes, and the images that cannot be used.

    Raises:
        ConfigError: the batch does not fit the data or the processes, the augmentation does not
            fit the images, or the order of the samples cannot be had.
        DataError: there are fewer images than processes.
    """
    _warn(run, first_lines(images.notes))
    for name, split in (("train", images.train), ("test", images.test)):
        _warn(run, notes_on_split(name, split, images.class_names))
    order = choose_order(run.config.batch, len(images.train), labels=images.train.labels)
    device, normalization = run.accelerator.device, images.normalization
    reader = AugmentedImageReader(
        images.train,
        normalization=normalization,
        device=device,
        augment=augment,
        seed=run.config.seed,
        kept=order.kept,
    )
    evaluated = ImageReader(images.test, normalization=normalization, device=device)
    return _build_loaders(run, images, augment, order, reader, evaluated)


def build_photo_loaders(
    run: Run, photos: Photos, *, augment: PhotoAugmentConfig, transform: EvalTransform
) -> tuple[TrainLoader[AugmentedPhotoReader], EvalLoader[PhotoReader]]:
    """Return the training and the evaluation loader of this process.

    The main process logs the photos' notes.

    Raises:
        ConfigError: the batch does not fit the data or the processes, the augmentation does not
            fit the size of the input, or the order of the samples cannot be had.
        DataError: there are fewer photos than processes.
    """
    _warn(run, first_lines(photos.notes))
    order = choose_order(run.config.batch, len(photos.train), labels=photos.train.labels)
    device, num_workers = run.accelerator.device, run.config.batch.num_workers
    reader = AugmentedPhotoReader(
        photos.train,
        transform=transform,
        device=device,
        num_workers=num_workers,
        augment=augment,
        num_classes=photos.num_classes,
        seed=run.config.seed,
        kept=order.kept,
    )
    evaluated = PhotoReader(photos.val, transform=transform, device=device, num_workers=num_workers)
    return _build_loaders(run, photos, augment, order, reader, evaluated)


def _build_loaders(
    run: Run,
    data: ImageDataset | Photos,
    augment: AugmentConfig | PhotoAugmentConfig,
    order: SampleOrder,
    reader: Reader,
    evaluated: Reader,
) -> tuple[TrainLoader[Any], EvalLoader[Any]]:
    accelerator, batch = run.accelerator, run.config.batch
    train = build_train_loader(
        reader, batch, seed=run.config.seed, accelerator=accelerator, order=order
    )
    described = describe(data.class_names, augment, source=getattr(run.config, "dataset", None))
    train.description = "\n".join([described, *first_lines(data.facts)])
    evaluation = build_eval_loader(
        evaluated, batch, num_parts=train.plan.num_parts, accelerator=accelerator
    )
    return train, evaluation


def _warn(run: Run, notes: Iterable[str]) -> None:
    """Log the notes on the main process, where alone they are looked for."""
    if run.accelerator.is_main_process:
        for note in notes:
            logger.warning(note)


def notes_on_split(name: str, split: ImageSplit, class_names: Sequence[str]) -> Iterator[str]:
    """Yield a line for images that are left out, and one for those of nearly a single shade."""
    if split.left_out:
        total = len(split) + len(split.left_out)
        listed = "; ".join(bad.message for bad in split.left_out)
        yield f"{len(split.left_out)} of {total} {name} images are left out: {listed}"
    ranges = PixelRanges()
    for index in torch.linspace(0, len(split) - 1, min(_NUM_LOOKED_AT, len(split))).long():
        found = range_of(split.images[index].numpy())
        ranges.add(found, "", class_names[int(split.labels[index])])
    yield from ranges.notes(f"{name} images")
