"""Loaders of photos, which decode and augment in threads.

Batches come in order; a bounded number of them is made ahead.

Shapes: B batch (may be 0), S size of a model's input, K classes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...core.batch_plan import BatchPlan, split_evenly
from ...core.errors import ConfigError
from ...core.types import Batch, StepBatch
from ...data.dataloader import DeviceCopy, read_steps
from ...data.order import SampleOrder, choose_order, uniform_order
from ...distributed.streams import has_streams
from ...run.session import Run
from ..augment.batch import draw_mix, draw_partners
from ..augment.photo import PhotoAugment, PhotoAugmentConfig
from ..sources.listing import first_lines
from ..sources.photos import Photos
from ..sources.raw import PhotoSplit
from .description import describe
from .eval_transform import EvalTransform
from .photo_decode import decode_photo
from .pixels import Normalizer

_logger = logging.getLogger(__name__)

_BATCHES_AHEAD = 2
_ROWS_PER_TASK = 4

MakeRow = Callable[[int], Tensor]
"""Returns the pixels of row i of a batch, uint8 [S, S, 3]."""


class PhotoReader:
    """Batches of photos as uint8 [B, S, S, 3] in host memory, pinned if `device` is an accelerator.

    Their `sample_ids` are the drawn ids (see `order.py`) that `read` was given.

    `num_workers` threads decode; 0: the calling thread. The threads end with the iterator of
    `read`, however it ends.
    """

    def __init__(
        self, split: PhotoSplit, *, size: int, device: torch.device, num_workers: int
    ) -> None:
        self.split = split
        self.size = size
        self.device = device
        self.num_workers = num_workers
        self._labels = torch.from_numpy(split.labels)

    def extremes(self, ids: Tensor) -> Batch:
        """Return the smallest and the largest label of photos `ids`, with black pixels."""
        labels = self._labels[ids]
        places = torch.stack([labels.argmin(), labels.argmax()]) // (labels.numel() // len(ids))
        found = ids[places]
        return Batch(torch.zeros(2, 3, self.size, self.size), self._labels[found], found)

    def read(self, ids: Iterable[Tensor], rows_of: Callable[[Tensor], MakeRow]) -> Iterator[Batch]:
        """Yield a batch with labels for each tensor of `ids` [B].

        `rows_of(batch_ids)` returns a function that makes the pixels of one row.

        Raises:
            DataError: a photo cannot be read or decoded.
        """
        if self.num_workers == 0:
            for batch_ids in ids:
                batch = self._new_batch(batch_ids)
                make_row = rows_of(batch_ids)
                _fill(batch.inputs.numpy(), make_row, range(len(batch_ids)))
                yield batch
            return
        # A thread that has never asked for the number of its threads takes over the number that
        # another thread sets (torch 2.13): the calling thread asks before the workers set theirs.
        torch.get_num_threads()
        pool = ThreadPoolExecutor(self.num_workers, "photos", torch.set_num_threads, (1,))
        ahead: deque[tuple[Batch, list[Future[None]]]] = deque()
        try:
            for batch_ids in ids:
                batch = self._new_batch(batch_ids)
                make_row = rows_of(batch_ids)
                # An array, because other threads may not write to a tensor of inference mode.
                pixels = batch.inputs.numpy()
                rows = range(len(batch_ids))
                parts = [rows[start : start + _ROWS_PER_TASK] for start in rows[::_ROWS_PER_TASK]]
                tasks = [pool.submit(_fill, pixels, make_row, part) for part in parts]
                ahead.append((batch, tasks))
                if len(ahead) > _BATCHES_AHEAD:
                    yield _finished(ahead)
            while ahead:
                yield _finished(ahead)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _new_batch(self, ids: Tensor) -> Batch:
        is_pinned = has_streams(self.device)
        pixels = torch.empty(
            (len(ids), self.size, self.size, 3),
            dtype=torch.uint8,
            pin_memory=is_pinned,
        )
        batch = Batch(pixels, self._labels[ids % len(self.split)], ids)
        return batch.pin_memory() if is_pinned else batch


def _fill(pixels: NDArray[np.uint8], make_row: MakeRow, rows: range) -> None:
    for row in rows:
        pixels[row] = make_row(row).numpy()


def _finished(ahead: deque[tuple[Batch, list[Future[None]]]]) -> Batch:
    """Return the oldest batch once its tasks are done."""
    batch, tasks = ahead.popleft()
    for task in tasks:
        task.result()
    return batch


class PhotoLoader:
    """Training step batches of one process: inputs [B, 3, S, S], targets [B].

    Targets are weights per class [B, K] when photos are mixed or have several labels. A run prints
    `description` at its start.
    """

    description: str

    def __init__(
        self,
        photos: PhotoSplit,
        *,
        plan: BatchPlan,
        augment: PhotoAugmentConfig,
        transform: EvalTransform,
        num_classes: int,
        seed: int,
        device: torch.device,
        process_index: int = 0,
        num_workers: int = 0,
        order: SampleOrder | None = None,
    ) -> None:
        self.order = order or uniform_order(len(photos))
        if plan.num_samples != self.order.num_samples:
            raise ValueError(
                f"the plan is for {plan.num_samples} samples, an epoch has {self.order.num_samples}"
            )
        if augment.crop == "padded" and augment.crop_padding >= transform.size:
            flag = f"--augment.crop-padding {augment.crop_padding}"
            fact = f"{flag} is too much for {transform.size} pixels"
            raise ConfigError("AUGMENT", f"{fact}: set it below {transform.size}")
        self.plan = plan
        self._augment = augment
        self._transform = transform
        self._num_classes = num_classes
        self._seed = seed
        self._process_index = process_index
        self._reader = PhotoReader(
            photos,
            size=transform.size,
            device=device,
            num_workers=num_workers,
        )
        self._copy = DeviceCopy(device)
        self._normalize = _normalizer(transform, device)

    @property
    def class_counts(self) -> Tensor:
        """The number of samples of each class that are trained on, [K]."""
        labels = torch.from_numpy(self._reader.split.labels)[self.order.kept]
        return self._weights_of(labels).sum(0)

    def extremes(self) -> Batch:
        """Return the smallest and the largest label that is trained on, with black pixels."""
        return self._reader.extremes(self.order.kept)

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch`, starting at step `first_step`.

        Seeking is O(1).

        Raises:
            DataError: a photo cannot be read or decoded.
        """
        split = self._reader.split
        augment = PhotoAugment(
            self._augment,
            size=self._transform.size,
            mean=self._transform.mean,
            seed=self._seed,
            epoch=epoch,
        )

        def rows_of(ids: Tensor) -> MakeRow:
            draws = augment.draw(ids)
            numbers = (ids % len(split)).tolist()

            def make_row(row: int) -> Tensor:
                number = numbers[row]
                return augment(split.encoded_at(number), split.name_of(number), draws[row])

            return make_row

        def read(ids: Sequence[Tensor]) -> Iterator[Batch]:
            return self._reader.read((self._with_partners(each, epoch) for each in ids), rows_of)

        yield from read_steps(
            self.plan,
            self.order.draw(seed=self._seed, epoch=epoch),
            first_step,
            self._process_index,
            read=read,
            to_device=lambda batch: self._finish(self._copy(batch), epoch),
        )

    def _with_partners(self, ids: Tensor, epoch: int) -> Tensor:
        """Return the ids, followed by the ids of the photos that they are mixed with, if any."""
        if not self._augment.mixes:
            return ids
        kept = self.order.kept
        places = draw_partners(ids, num_samples=len(kept), seed=self._seed, epoch=epoch)
        return torch.cat([ids, kept[places]])

    def _finish(self, batch: Batch, epoch: int) -> Batch:
        """Normalise the photos, and mix them with their partners, on the device."""
        images = self._normalize(batch.inputs)
        num_photos = len(self._reader.split)
        if not self._augment.mixes:
            return Batch(images, batch.targets, batch.sample_ids % num_photos)
        ids, _ = batch.sample_ids.chunk(2)
        images, others = images.chunk(2)
        labels, other_labels = (self._weights_of(part) for part in batch.targets.chunk(2))
        pixel_weights, weights = draw_mix(
            self._augment,
            ids,
            height=self._transform.size,
            width=self._transform.size,
            seed=self._seed,
            epoch=epoch,
        )
        targets = weights[:, None] * labels + (1 - weights[:, None]) * other_labels
        return Batch(torch.lerp(others, images, pixel_weights), targets, ids % num_photos)

    def _weights_of(self, labels: Tensor) -> Tensor:
        """Return labels [B] or [B, K] as weights of the classes [B, K]."""
        return labels if labels.ndim == 2 else F.one_hot(labels, self._num_classes).float()


class PhotoEvalLoader:
    """Evaluation batches of one process: a contiguous part of a split, which may be empty."""

    def __init__(
        self,
        photos: PhotoSplit,
        *,
        transform: EvalTransform,
        batch_size: int,
        device: torch.device,
        num_processes: int = 1,
        process_index: int = 0,
        num_workers: int = 0,
        num_parts: int | None = None,
    ) -> None:
        self.num_samples = len(photos)
        self._transform = transform
        self._ranges = split_evenly(
            range(len(photos)),
            batch_size,
            num_processes,
            process_index,
            num_parts=num_parts,
        )
        self._reader = PhotoReader(
            photos,
            size=transform.size,
            device=device,
            num_workers=num_workers,
        )
        self._copy = DeviceCopy(device)
        self._normalize = _normalizer(transform, device)

    def extremes(self) -> Batch:
        """Return the smallest and the largest label, with black pixels."""
        return self._reader.extremes(torch.arange(self.num_samples))

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in order.

        Raises DataError for a photo that cannot be read or decoded.
        """
        split = self._reader.split

        def rows_of(ids: Tensor) -> MakeRow:
            numbers = ids.tolist()

            def make_row(row: int) -> Tensor:
                number = numbers[row]
                return self._transform(split.encoded_at(number), split.name_of(number))

            return make_row

        ids = [torch.arange(part.start, part.stop) for part in self._ranges]
        for host_batch in self._reader.read(ids, rows_of):
            batch = self._copy(host_batch)
            yield Batch(self._normalize(batch.inputs), batch.targets, batch.sample_ids)

    def picture_of(self, sample_id: int) -> Tensor:
        """Return what the model sees of a photo, uint8 [S, S, 3]."""
        return self._transform(self._reader.split.encoded_at(sample_id), self.name_of(sample_id))

    def name_of(self, sample_id: int) -> str:
        """Describe where a photo is stored."""
        return self._reader.split.name_of(sample_id)


class PhotoDataset:
    """A split as a map-style dataset of `(transform(photo), label)`.

    It is for `build_trainer` and any DataLoader. `transform` gets a `PIL.Image` in RGB,
    upright, and may draw from the global generators of Python, numpy and torch.
    """

    def __init__(self, photos: PhotoSplit, transform: Callable[[Any], Any]) -> None:
        self._photos = photos
        self._transform = transform

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        pixels = decode_photo(self._photos.encoded_at(index), self._photos.name_of(index))
        return self._transform(Image.fromarray(pixels)), self._photos.labels[index]


def build_photo_loaders(
    run: Run, photos: Photos, *, augment: PhotoAugmentConfig, transform: EvalTransform
) -> tuple[PhotoLoader, PhotoEvalLoader]:
    """Return the training and the evaluation loader of this process.

    The main process logs the photos' notes.

    Raises:
        ConfigError: the batch does not fit the data or the processes, the augmentation does not
            fit the size of the input, or the order of the samples cannot be had.
        DataError: there are fewer photos than processes.
    """
    accelerator = run.accelerator
    batch = run.config.batch
    if accelerator.is_main_process:
        for note in first_lines(photos.notes):
            _logger.warning(note)
    order = choose_order(batch, len(photos.train), labels=photos.train.labels)
    train = PhotoLoader(
        photos.train,
        plan=batch.plan(order.num_samples, num_processes=accelerator.num_processes),
        augment=augment,
        transform=transform,
        num_classes=photos.num_classes,
        seed=run.config.seed,
        device=accelerator.device,
        process_index=accelerator.process_index,
        num_workers=batch.num_workers,
        order=order,
    )
    evaluation = PhotoEvalLoader(
        photos.val,
        transform=transform,
        batch_size=batch.eval_batch_size,
        device=accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        num_workers=batch.num_workers,
        num_parts=train.plan.num_parts,
    )
    train.description = "\n".join(
        [describe(photos.class_names, augment), *first_lines(photos.facts)]
    )
    return train, evaluation


def _normalizer(transform: EvalTransform, device: torch.device) -> Normalizer:
    return Normalizer(transform.mean, transform.std, num_pixels=transform.size**2, device=device)
