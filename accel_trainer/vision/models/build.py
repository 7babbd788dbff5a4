"""Builds the training and evaluation loaders of an image dataset."""

from __future__ import annotations

import logging

from accelerate import Accelerator

from ...core.batch_plan import BatchConfig
from ..augment.batch import AugmentConfig
from ..data.images import ImageDataset, ImageSplit
from ..data.loader import ImageEvalLoader, ImageLoader

_logger = logging.getLogger(__name__)


def build_image_loaders(
    images: ImageDataset, batch: BatchConfig, *, augment: AugmentConfig, seed: int, accelerator: Accelerator
) -> tuple[ImageLoader, ImageEvalLoader]:
    """Return the training and the evaluation loader of this process, with the images on its device."""
    if accelerator.is_main_process:
        for name, split in (("train", images.train), ("test", images.test)):
            _warn_of_left_out(name, split)
    train = ImageLoader(
        images.train, plan=batch.plan(len(images.train), num_processes=accelerator.num_processes),
        process_index=accelerator.process_index, seed=seed, augment=augment, normalization=images.normalization,
        device=accelerator.device,
    )  # fmt: skip
    evaluation = ImageEvalLoader(
        images.test, batch_size=batch.eval_batch_size, num_processes=accelerator.num_processes,
        process_index=accelerator.process_index, normalization=images.normalization, device=accelerator.device,
        num_parts=train.plan.num_parts,
    )  # fmt: skip
    return train, evaluation


def _warn_of_left_out(name: str, split: ImageSplit) -> None:
    if split.left_out:
        total = len(split) + len(split.left_out)
        listed = "; ".join(bad.message for bad in split.left_out)
        _logger.warning("%d of %d %s images are left out: %s", len(split.left_out), total, name, listed)
