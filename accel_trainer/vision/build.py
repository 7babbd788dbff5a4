"""The two loaders of a run over one image data set."""

from __future__ import annotations

from accelerate import Accelerator

from ..plan import BatchConfig
from .augment import AugmentConfig
from .images import ImageDataset
from .loader import ImageEvalLoader, ImageLoader


def build_image_loaders(
    images: ImageDataset, batch: BatchConfig, *, augment: AugmentConfig, seed: int, accelerator: Accelerator
) -> tuple[ImageLoader, ImageEvalLoader]:
    """Return the training and the evaluation loader of this process, with the images on its device."""
    train = ImageLoader(
        images.train,
        plan=batch.plan(len(images.train), num_processes=accelerator.num_processes),
        process_index=accelerator.process_index,
        seed=seed,
        augment=augment,
        normalization=images.normalization,
        device=accelerator.device,
    )
    evaluation = ImageEvalLoader(
        images.test,
        batch_size=batch.eval_batch_size,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        normalization=images.normalization,
        device=accelerator.device,
    )
    return train, evaluation
