"""Loaders of a decoded dataset: seekable training batches, and evaluation without padding.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...core.batch_plan import BatchPlan, split_evenly
from ...core.errors import ConfigError
from ...core.types import Batch, LazyBatches, StepBatch
from ...data.order import SampleOrder, choose_order, uniform_order
from ...run.session import Run
from ..augment.batch import (
    AugmentConfig,
    Placement,
    cut_out,
    draw_mix,
    draw_partners,
    draw_placement,
)
from ..sources.listing import first_lines
from .description import describe
from .images import ImageDataset, ImageSplit, Normalization
from .pixel_range import PixelRange, range_of
from .pixels import Normalizer, crop

_logger = logging.getLogger(__name__)

_NUM_LOOKED_AT = 256


class _Pixels:
    """A split's images on the device of the run, and their conversion to model inputs."""

    def __init__(
        self, split: ImageSplit, normalization: Normalization, device: torch.device
    ) -> None:
        self.images = split.images.permute(0, 2, 3, 1).contiguous().to(device)  # uint8 [N, H, W, C]
        self.labels = split.labels.to(device)
        self._files = split.files if device.type == "cpu" else ()
        num_pixels = self.images.shape[1] * self.images.shape[2]
        self.normalize = Normalizer(
            normalization.mean,
            normalization.std,
            num_pixels=num_pixels,
            device=device,
        )

    def extremes(self, ids: Tensor) -> Batch:
        """Return, of images `ids`, those with the smallest and the largest label, on the CPU."""
        labels = self.labels[ids]
        places = torch.stack([labels.argmin(), labels.argmax()])
        found = ids[places]
        return Batch(self.normalize(self.images[found]), self.labels[found], found).map(Tensor.cpu)

    def check_files(self) -> None:
        """Raise DataError if the image cache has been modified."""
        for file in self._files:
            file.check()


class ImageLoader:
    """Training step batches of one process: inputs [B, C, H, W], targets [B].

    Targets are weights per class [B, K] when images are mixed. The images stay uint8 until they are
    normalised: in the dataset's memory map on a CPU; on any other device in a copy that is made
    once. A run prints `description` at its start.
    """

    description: str

    def __init__(
        self,
        split: ImageSplit,
        *,
        plan: BatchPlan,
        process_index: int,
        seed: int,
        augment: AugmentConfig,
        normalization: Normalization,
        device: torch.device,
        order: SampleOrder | None = None,
    ) -> None:
        self.order = order or uniform_order(len(split))
        if plan.num_samples != self.order.num_samples:
            raise ValueError(
                f"the plan is for {plan.num_samples} samples, an epoch has {self.order.num_samples}"
            )
        smallest = min(split.images.shape[2:])
        most = smallest - 1 if augment.crop_mode == "reflect" else smallest
        if augment.crop_padding > most:
            flag = f"--augment.crop-padding {augment.crop_padding}"
            fact = f"{flag} is too much for images of {smallest} pixels"
            raise ConfigError("AUGMENT", f"{fact}: set it to {most} or less")
        self.plan = plan
        self._process_index = process_index
        self._seed = seed
        self._augment = augment
        self._num_classes = split.num_classes
        self._pixels = _Pixels(split, normalization, device)
        self._kept = self.order.kept.to(device)

    @property
    def class_counts(self) -> Tensor:
        """The number of samples of each class that are trained on, int64 [K]."""
        return torch.bincount(self._pixels.labels[self._kept], minlength=self._num_classes)

    def extremes(self) -> Batch:
        """Return images that are trained on, with the smallest and the largest label."""
        return self._pixels.extremes(self._kept)

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch`, starting at step `first_step`.

        Seeking is O(1).

        Raises:
            DataError: at the end of the epoch, if the image cache was modified meanwhile.
        """
        drawn = self.order.draw(seed=self._seed, epoch=epoch).to(self._pixels.images.device)
        ids = drawn % len(self._pixels.images)
        # Drawn for the whole epoch at once: batch by batch this takes 20% of a CPU loader's time.
        placements = draw_placement(self._augment, drawn, seed=self._seed, epoch=epoch)
        labels = self._pixels.labels[ids]

        def make(ranges: Sequence[range], index: int) -> Batch:
            part = slice(ranges[index].start, ranges[index].stop)
            images = self._augmented(
                ids[part], drawn[part], placements.between(part.start, part.stop), epoch
            )
            targets = labels[part]
            if self._augment.mixes:
                images, targets = self._mixed(images, targets, drawn[part], epoch)
            return Batch(images, targets, ids[part])

        # Not `read_steps`: it reads all micro-batches of a step and keeps them until the step ends.
        # Here a micro-batch is made when it is indexed, so one at a time is in memory.
        for step in range(first_step, self.plan.steps_per_epoch):
            ranges = self.plan.micro_batches(step, self._process_index)
            micro_batches = LazyBatches(partial(make, ranges), len(ranges))
            yield StepBatch(micro_batches, num_samples=self.plan.step_batch_size(step))
        self._pixels.check_files()

    def _augmented(self, ids: Tensor, drawn: Tensor, placements: Placement, epoch: int) -> Tensor:
        """Crop, flip, normalise and cut out the images at `ids` [B], drawn as `drawn`."""
        augment = self._augment
        crops = crop(
            self._pixels.images,
            ids,
            placements,
            padding=augment.crop_padding,
            mode=augment.crop_mode,
        )
        images = self._pixels.normalize(crops)
        return cut_out(augment, images, drawn, seed=self._seed, epoch=epoch)

    def _mixed(
        self, images: Tensor, labels: Tensor, drawn: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with another training image, augmented as that image is in this epoch."""
        height, width = images.shape[2:]
        partners = self._kept[
            draw_partners(drawn, num_samples=len(self._kept), seed=self._seed, epoch=epoch)
        ]
        pixel_weights, weights = draw_mix(
            self._augment,
            drawn,
            height=height,
            width=width,
            seed=self._seed,
            epoch=epoch,
        )
        placements = draw_placement(self._augment, partners, seed=self._seed, epoch=epoch)
        others = self._augmented(partners, partners, placements, epoch)
        images = torch.lerp(others, images, pixel_weights)
        targets = weights.new_zeros((len(drawn), self._num_classes))
        targets.scatter_add_(1, labels[:, None], weights[:, None])
        targets.scatter_add_(1, self._pixels.labels[partners][:, None], 1 - weights[:, None])
        return images, targets


class ImageEvalLoader:
    """Evaluation batches of one process: a contiguous part of a split, which may be empty.

    The images are normalised and not augmented.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        batch_size: int,
        num_processes: int,
        process_index: int,
        normalization: Normalization,
        device: torch.device,
        num_parts: int | None = None,
    ) -> None:
        self.num_samples = len(split)
        self._ranges = split_evenly(
            range(len(split)),
            batch_size,
            num_processes,
            process_index,
            num_parts=num_parts,
        )
        self._pixels = _Pixels(split, normalization, device)

    def extremes(self) -> Batch:
        """Return images with the smallest and the largest label."""
        pixels = self._pixels
        return pixels.extremes(torch.arange(self.num_samples, device=pixels.images.device))

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in order.

        Raises DataError at the end if the image cache was modified meanwhile.
        """
        pixels = self._pixels
        for part in self._ranges:
            ids = torch.arange(part.start, part.stop, device=pixels.images.device)
            images = pixels.images[part.start : part.stop]
            labels = pixels.labels[part.start : part.stop]
            yield Batch(pixels.normalize(images), labels, ids)
        pixels.check_files()

    def picture_of(self, sample_id: int) -> Tensor:
        """Return an image, uint8 [H, W, C] on the CPU."""
        return self._pixels.images[sample_id].cpu()

    def name_of(self, sample_id: int) -> str:
        """Describe an image by its number, because the cache keeps no names."""
        return f"test image {sample_id}"


def build_image_loaders(
    run: Run, images: ImageDataset, *, augment: AugmentConfig
) -> tuple[ImageLoader, ImageEvalLoader]:
    """Return the training and the evaluation loader of this process.

    The main process logs the dataset's notes, and the images that cannot be used.

    Raises:
        ConfigError: the batch does not fit the data or the processes, the augmentation does not
            fit the images, or the order of the samples cannot be had.
        DataError: there are fewer images than processes.
    """
    accelerator = run.accelerator
    batch = run.config.batch
    if accelerator.is_main_process:
        for note in first_lines(images.notes):
            _logger.warning(note)
        for name, split in (("train", images.train), ("test", images.test)):
            _warn_of_left_out(name, split)
            _warn_of_range(name, split)
    order = choose_order(batch, len(images.train), labels=images.train.labels)
    train = ImageLoader(
        images.train,
        plan=batch.plan(order.num_samples, num_processes=accelerator.num_processes),
        process_index=accelerator.process_index,
        seed=run.config.seed,
        augment=augment,
        normalization=images.normalization,
        device=accelerator.device,
        order=order,
    )
    evaluation = ImageEvalLoader(
        images.test,
        batch_size=batch.eval_batch_size,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        normalization=images.normalization,
        device=accelerator.device,
        num_parts=train.plan.num_parts,
    )
    train.description = "\n".join(
        [describe(images.class_names, augment), *first_lines(images.facts)]
    )
    return train, evaluation


def _warn_of_left_out(name: str, split: ImageSplit) -> None:
    if split.left_out:
        total = len(split) + len(split.left_out)
        listed = "; ".join(bad.message for bad in split.left_out)
        _logger.warning(
            "%d of %d %s images are left out: %s",
            len(split.left_out),
            total,
            name,
            listed,
        )


def _warn_of_range(name: str, split: ImageSplit) -> None:
    found = PixelRange()
    for index in torch.linspace(0, len(split) - 1, min(_NUM_LOOKED_AT, len(split))).long():
        found |= range_of(split.images[index].numpy())
    if note := found.note(f"{name} images"):
        _logger.warning(note)
