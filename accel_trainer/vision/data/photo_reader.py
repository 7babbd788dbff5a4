"""Reads photos in threads, which decode and augment.

Batches come in order; a bounded number of them is made ahead.

Shapes: B batch (may be 0), S size of a model's input, K classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.types import Batch
from ...data.order import Ids, take
from ...data.reader import Reader
from ...distributed.streams import has_streams
from ..augment.mix import Mixer
from ..augment.photo import PhotoAugment, PhotoAugmentConfig
from ..sources.raw import PhotoSplit
from .eval_transform import EvalTransform
from .photo_decode import Pixels, decode_photo
from .pixels import Normalizer

_BATCHES_AHEAD = 2
_ROWS_PER_TASK = 4

MakeRow = Callable[[int], Tensor]
"""Returns the pixels of row i of a batch, uint8 [S, S, 3]."""


class PhotoReader(Reader):
    """Photos as they are evaluated: inputs [B, 3, S, S], and targets [B], or [B, K] of several.

    `num_workers` threads decode; 0: the calling thread. The threads end with the iterator of
    `read`, however it ends. Host memory is pinned if `device` is an accelerator.
    """

    def __init__(
        self,
        split: PhotoSplit,
        *,
        transform: EvalTransform,
        device: torch.device,
        num_workers: int = 0,
    ) -> None:
        self._split = split
        self._labels = torch.from_numpy(split.labels)
        self._transform = transform
        self._is_pinned = has_streams(device)
        self.num_workers = num_workers
        self._normalize = Normalizer(
            transform.mean, transform.std, num_pixels=transform.size**2, device=device
        )

    def __len__(self) -> int:
        return len(self._split)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch with uint8 [B, S, S, 3] and labels for each tensor of `ids`.

        Raises:
            DataError: a photo cannot be read or decoded.
        """
        if self.num_workers == 0:
            for batch_ids in ids:
                batch = self._new_batch(batch_ids)
                make_row = self._row_maker(batch_ids, epoch)
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
                make_row = self._row_maker(batch_ids, epoch)
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
        size = self._transform.size
        pixels = torch.empty(
            (len(ids), size, size, 3), dtype=torch.uint8, pin_memory=self._is_pinned
        )
        batch = Batch(pixels, self._labels[ids % len(self)], ids)
        return batch.pin_memory() if self._is_pinned else batch

    def _row_maker(self, ids: Tensor, epoch: int | None) -> MakeRow:
        numbers = ids.tolist()
        return lambda row: self.picture_of(numbers[row])

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        """Normalise the photos of a batch."""
        return Batch(self._normalize(batch.inputs), batch.targets, batch.sample_ids)

    def fingerprint(self) -> str:
        """Return an empty string: `Photos` has a hash of all photos."""
        return ""

    def extremes(self, ids: Ids) -> Batch:
        """Return the smallest and the largest label of photos `ids`, with black pixels."""
        labels = take(self._labels, ids)
        places = torch.stack([labels.argmin(), labels.argmax()]) // (labels.numel() // len(ids))
        found = torch.tensor([int(ids[place]) for place in places.tolist()])
        size = self._transform.size
        return Batch(torch.zeros(2, 3, size, size), self._labels[found], found)

    def picture_of(self, sample_id: int) -> Tensor:
        """Return what the model sees of a photo, uint8 [S, S, 3]."""
        return self._transform(self._split.encoded_at(sample_id), self.name_of(sample_id))

    def name_of(self, sample_id: int) -> str:
        """Describe where a photo is stored."""
        return self._split.name_of(sample_id)


class AugmentedPhotoReader(PhotoReader):
    """Photos as they are trained on; in evaluations they are not augmented.

    They are mixed with the photos `kept`, and targets are then weights per class [B, K].
    """

    def __init__(
        self,
        split: PhotoSplit,
        *,
        transform: EvalTransform,
        device: torch.device,
        num_workers: int = 0,
        augment: PhotoAugmentConfig,
        num_classes: int,
        seed: int,
        kept: Ids | None = None,
    ) -> None:
        super().__init__(split, transform=transform, device=device, num_workers=num_workers)
        if augment.crop == "padded" and augment.crop_padding >= transform.size:
            flag = f"--augment.crop-padding {augment.crop_padding}"
            fact = f"{flag} is too much for {transform.size} pixels"
            raise ConfigError("AUGMENT", f"{fact}: set it below {transform.size}")
        self._augment = augment
        self._seed = seed
        kept = range(len(split)) if kept is None else kept
        self._mixer = Mixer(augment, kept=kept, num_classes=num_classes, seed=seed)

    @property
    def class_counts(self) -> Tensor:
        """The number of photos of each class that are trained on, [K]."""
        return self._mixer.class_counts(self._labels)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch of photos for each tensor of `ids`, with the partners of their mixes.

        Raises:
            DataError: a photo cannot be read or decoded.
        """
        if epoch is not None:
            ids = (self._mixer.with_partners(each, epoch) for each in ids)
        return super().read(ids, epoch)

    def _row_maker(self, ids: Tensor, epoch: int | None) -> MakeRow:
        if epoch is None:
            return super()._row_maker(ids, epoch)
        split, transform = self._split, self._transform
        augment = PhotoAugment(
            self._augment,
            size=transform.size,
            mean=transform.mean,
            seed=self._seed,
            epoch=epoch,
        )
        draws = augment.draw(ids)
        numbers = (ids % len(split)).tolist()

        def make_row(row: int) -> Tensor:
            number = numbers[row]
            return augment(split.encoded_at(number), split.name_of(number), draws[row])

        return make_row

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        """Normalise the photos of a batch, and mix them with their partners."""
        batch = super().finish(batch, epoch)
        return batch if epoch is None else self._mixer.mix(batch, epoch)


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


def _fill(pixels: Pixels, make_row: MakeRow, rows: range) -> None:
    for row in rows:
        pixels[row] = make_row(row).numpy()


def _finished(ahead: deque[tuple[Batch, list[Future[None]]]]) -> Batch:
    """Return the oldest batch once its tasks are done."""
    batch, tasks = ahead.popleft()
    for task in tasks:
        task.result()
    return batch
