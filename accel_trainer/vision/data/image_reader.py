"""Reads decoded images, which lie on the device: a batch holds their ids until it is finished.

Shapes: B batch (may be 0), C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.extremes import extremes, note_extremes
from ...core.types import Batch
from ...data.order import Ids, take
from ...data.reader import Reader
from ..augment.batch import AugmentConfig, cut_out, draw_placement
from ..augment.mix import Mixer
from .images import ImageSplit, Normalization
from .pixels import Normalizer, crop

_NUM_DRAWN = 256  # batches


class ImageReader(Reader):
    """Images as they are evaluated: inputs [B, C, H, W], normalised, and targets [B].

    The images stay uint8 until then: in the dataset's memory map on a CPU; on any other device in a
    copy that is made once.
    """

    def __init__(
        self, split: ImageSplit, *, normalization: Normalization, device: torch.device
    ) -> None:
        self.images = split.images.permute(0, 2, 3, 1).contiguous().to(device)  # uint8 [N, H, W, C]
        self.labels = split.labels.to(device)
        # Labels that are picked from them on a device need no check there.
        self._ends = extremes(split.labels)
        self._files = split.files if device.type == "cpu" else ()
        self._normalize = Normalizer(
            normalization.mean,
            normalization.std,
            num_pixels=self.images.shape[1] * self.images.shape[2],
            device=device,
        )

    def __len__(self) -> int:
        return len(self.images)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch for each tensor of `ids`.

        Raises DataError at the end if the image cache was modified meanwhile.
        """
        for batch_ids in ids:
            yield Batch(None, None, batch_ids)
        self._check_files()

    def _check_files(self) -> None:
        for file in self._files:
            file.check()

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        """Return the images and labels of a batch."""
        ids = batch.sample_ids
        return Batch(self._normalize(self.images[ids]), self._labels_of(ids), ids)

    def _labels_of(self, ids: Tensor) -> Tensor:
        labels = self.labels[ids]
        note_extremes(labels, self._ends)
        return labels

    def fingerprint(self) -> str:
        """Return an empty string: `ImageDataset` has a hash of all images."""
        return ""

    def extremes(self, ids: Ids) -> Batch:
        """Return, of images `ids`, those with the smallest and the largest label."""
        labels = take(self.labels, ids)
        places = int(labels.argmin()), int(labels.argmax())
        found = torch.tensor([int(ids[place]) for place in places])
        return self.finish(Batch(None, None, found), None).map(Tensor.cpu)

    def picture_of(self, sample_id: int) -> Tensor:
        """Return an image, uint8 [H, W, C] on the CPU."""
        return self.images[sample_id].cpu()

    def name_of(self, sample_id: int) -> str:
        """Describe an image by its number, because the cache keeps no names."""
        return f"test image {sample_id}"


class AugmentedImageReader(ImageReader):
    """Images as they are trained on; in evaluations they are not augmented.

    They are mixed with the images `kept`, and targets are then weights per class [B, K].
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        normalization: Normalization,
        device: torch.device,
        augment: AugmentConfig,
        seed: int,
        kept: Ids | None = None,
    ) -> None:
        super().__init__(split, normalization=normalization, device=device)
        smallest = min(split.images.shape[2:])
        most = smallest - 1 if augment.crop_mode == "reflect" else smallest
        if augment.crop_padding > most:
            flag = f"--augment.crop-padding {augment.crop_padding}"
            fact = f"{flag} is too much for images of {smallest} pixels"
            raise ConfigError("AUGMENT", f"{fact}: set it to {most} or less")
        self._augment = augment
        self._seed = seed
        kept = range(len(split)) if kept is None else kept
        self._mixer = Mixer(augment, kept=kept, num_classes=split.num_classes, seed=seed)

    @property
    def class_counts(self) -> Tensor:
        """The number of images of each class that are trained on, int64 [K]."""
        return self._mixer.class_counts(self.labels)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch for each tensor of `ids`; its inputs are their crops and flips.

        Raises DataError at the end if the image cache was modified meanwhile.
        """
        if epoch is None:
            yield from super().read(ids, epoch)
            return
        drawn_ids = (self._mixer.with_partners(each, epoch) for each in ids)
        # Drawn for many batches at once: batch by batch this takes 20% of a CPU loader's time.
        while batches := [*islice(drawn_ids, _NUM_DRAWN)]:
            drawn = torch.cat(batches).to(self.images.device, non_blocking=True)
            placements = draw_placement(self._augment, drawn, seed=self._seed, epoch=epoch)
            stop = 0
            for batch in batches:
                start, stop = stop, stop + len(batch)
                yield Batch(placements.between(start, stop), None, drawn[start:stop])
        self._check_files()

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        """Crop, flip, normalise, cut out and mix the images of a batch."""
        if epoch is None:
            return super().finish(batch, epoch)
        ids = batch.sample_ids % len(self)
        augment = self._augment
        crops = crop(
            self.images, ids, batch.inputs, padding=augment.crop_padding, mode=augment.crop_mode
        )
        images = cut_out(
            augment, self._normalize(crops), batch.sample_ids, seed=self._seed, epoch=epoch
        )
        return self._mixer.mix(Batch(images, self._labels_of(ids), batch.sample_ids), epoch)
