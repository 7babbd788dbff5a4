"""Loaders over a decoded data set: seekable training windows, and evaluation shards without padding.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from ..errors import ConfigError
from ..plan import BatchPlan, split_evenly
from ..seeding import epoch_permutation
from ..types import Batch, Window
from .augment import AugmentConfig, Placement, cut_out, draw_mix, draw_partners, draw_placement
from .images import ImageSplit, Normalization
from .pixels import crop, normalize


class _Pixels:
    """A split's images on the device that crops them, and what turns crops into the model's inputs."""

    def __init__(
        self,
        split: ImageSplit,
        *,
        normalization: Normalization,
        device: torch.device,
        keep_on_device: bool,
        channels_last: bool,
        dtype: torch.dtype,
    ) -> None:
        home = device if keep_on_device else torch.device("cpu")
        self.images = split.images.permute(0, 2, 3, 1).contiguous().to(home)  # uint8 [N, H, W, C]
        self.labels = split.labels.to(home)
        self._files = split.files if home.type == "cpu" else ()
        self.device, self.dtype, self.channels_last = device, dtype, channels_last
        num_pixels = self.images.shape[1] * self.images.shape[2]
        mean = torch.tensor(normalization.mean, dtype=torch.float64)
        std = torch.tensor(normalization.std, dtype=torch.float64)
        self._scale = (1 / (255 * std)).float().repeat(num_pixels).to(device)  # [H * W * C]
        self._offset = (-mean / std).float().repeat(num_pixels).to(device)

    def check_files(self) -> None:
        """Raise DataError if the cache that the images are read from has been written to."""
        for file in self._files:
            file.check()

    def normalized(self, crops: Tensor) -> Tensor:
        """Map uint8 [B, H, W, C] to float32 [B, C, H, W] on the device of the run."""
        crops = crops.to(self.device, non_blocking=True)
        return normalize(crops, self._scale, self._offset).permute(0, 3, 1, 2)

    def batch(self, images: Tensor, targets: Tensor, ids: Tensor) -> Batch:
        """Give images [B, C, H, W] the dtype and memory format of the model, and all of it the device."""
        images = images.to(self.dtype)
        return Batch(
            images if self.channels_last else images.contiguous(),
            targets.to(self.device, non_blocking=True),
            ids.to(self.device, non_blocking=True),
        )


class _LazyBatches(Sequence[Batch]):
    """Micro-batches that are made when asked for, so that a long accumulation keeps one in memory."""

    def __init__(self, make: Callable[[range], Batch], shares: Sequence[range]) -> None:
        self._make, self._shares = make, shares

    def __len__(self) -> int:
        return len(self._shares)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return _LazyBatches(self._make, self._shares[index])
        return self._make(self._shares[index])


class ImageLoader:
    """Training windows of one process: inputs [B, C, H, W], targets [B] or, when images are mixed, [B, K].

    The images stay uint8, in the data set's memory map on a CPU, copied once to any other device unless
    `keep_on_device` is False (for a data set larger than the device's memory); crops are made where they are.
    """

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
        keep_on_device: bool = True,
        channels_last: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if plan.num_samples != len(split):
            raise ValueError(f"the plan is for {plan.num_samples} samples, the split has {len(split)}")
        smallest = min(split.images.shape[2:])
        if augment.crop_mode == "reflect" and augment.crop_padding >= smallest:
            raise ConfigError(
                "AUGMENT",
                f"--augment.crop-padding {augment.crop_padding} cannot mirror images of {smallest} pixels: "
                f"set it below {smallest}, or --augment.crop-mode zero",
            )
        if augment.crop_padding > smallest:
            raise ConfigError(
                "AUGMENT",
                f"--augment.crop-padding {augment.crop_padding} leaves nothing of some images of {smallest} pixels: "
                f"set it to {smallest} or less",
            )
        self.plan = plan
        self._process_index, self._seed, self._augment = process_index, seed, augment
        self._num_classes = split.num_classes
        self._pixels = _Pixels(
            split,
            normalization=normalization,
            device=device,
            keep_on_device=keep_on_device,
            channels_last=channels_last,
            dtype=dtype,
        )

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield this process's windows of `epoch` from its step `first_step` on. Seeking is O(1).

        Raises:
            DataError: at the end of the epoch, if the cache of the images was written to meanwhile.
        """
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        order = order.to(self._pixels.images.device)
        # For the whole epoch at once: drawn batch by batch, the hashes take 20% of a CPU loader's time, and
        # on an accelerator 40 kernel launches a step.
        everyone = torch.arange(self.plan.num_samples, device=order.device)
        placements = draw_placement(self._augment, everyone, seed=self._seed, epoch=epoch)
        in_order, labels = placements.of(order), self._pixels.labels[order]  # a batch's are slices: they cost nothing

        def make(share: range) -> Batch:
            ids = order[share.start : share.stop]
            images = self._augmented(ids, in_order.between(share.start, share.stop), epoch)
            targets = labels[share.start : share.stop]
            if self._augment.mixes:
                images, targets = self._mixed(images, targets, ids, placements, epoch)
            return self._pixels.batch(images, targets, ids)

        for step in range(first_step, self.plan.steps_per_epoch):
            shares = self.plan.micro_batches(step, self._process_index)
            yield Window(_LazyBatches(make, shares), num_items=self.plan.window_size(step))
        self._pixels.check_files()

    def _augmented(self, ids: Tensor, placements: Placement, epoch: int) -> Tensor:
        """Crop, flip, normalise and cut the images at `ids` [B], each at its place."""
        augment = self._augment
        crops = crop(self._pixels.images, ids, placements, padding=augment.crop_padding, mode=augment.crop_mode)
        images = self._pixels.normalized(crops)
        return cut_out(augment, images, ids.to(images.device), seed=self._seed, epoch=epoch)

    def _mixed(
        self, images: Tensor, labels: Tensor, ids: Tensor, placements: Placement, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with one of the whole training set, augmented as that one is in this epoch."""
        height, width = images.shape[2:]
        partners = draw_partners(ids, num_samples=self.plan.num_samples, seed=self._seed, epoch=epoch)
        pixel_weights, shares = draw_mix(self._augment, ids, height=height, width=width, seed=self._seed, epoch=epoch)
        others = self._augmented(partners, placements.of(partners), epoch)
        images = torch.lerp(others, images, pixel_weights.to(images.device))
        targets = shares.new_zeros((len(ids), self._num_classes))
        targets.scatter_add_(1, labels[:, None], shares[:, None])
        targets.scatter_add_(1, self._pixels.labels[partners][:, None], 1 - shares[:, None])
        return images, targets


class ImageEvalLoader:
    """One process's contiguous share of a split, unchanged but for normalisation; it may be empty."""

    def __init__(
        self,
        split: ImageSplit,
        *,
        batch_size: int,
        num_processes: int,
        process_index: int,
        normalization: Normalization,
        device: torch.device,
        keep_on_device: bool = True,
        channels_last: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_samples = len(split)
        self._shares = split_evenly(
            range(len(split)), batch_size=batch_size, num_processes=num_processes, process_index=process_index
        )
        self._pixels = _Pixels(
            split,
            normalization=normalization,
            device=device,
            keep_on_device=keep_on_device,
            channels_last=channels_last,
            dtype=dtype,
        )

    def batches(self) -> Iterator[Batch]:
        """Yield the share in order. Raises DataError at its end if the cache was written to meanwhile."""
        pixels = self._pixels
        for share in self._shares:
            ids = torch.arange(share.start, share.stop, device=pixels.images.device)
            images, labels = pixels.images[share.start : share.stop], pixels.labels[share.start : share.stop]
            yield pixels.batch(pixels.normalized(images), labels, ids)
        pixels.check_files()
