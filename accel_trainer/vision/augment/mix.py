"""Mixes each training image with another one: mixup and cutmix.

Shapes: B batch (may be 0), C channels, H height, W width, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.types import Batch
from ...data.order import Ids, take, to_tensor
from .batch import BasicAugmentConfig, draw_mix, draw_partners


class Mixer:
    """Mixes images with others among `kept`, as `config` says: perhaps not at all."""

    def __init__(
        self, config: BasicAugmentConfig, *, kept: Ids, num_classes: int, seed: int
    ) -> None:
        self._config = config
        self._ids = kept
        self._kept = to_tensor(kept)
        self._num_classes = num_classes
        self._seed = seed

    def class_counts(self, labels: Tensor) -> Tensor:
        """Return the number of images of each class that are trained on, [K].

        `labels` are of all images: [N], or [N, K] if they have several classes.
        """
        kept = take(labels, self._ids)
        return kept.sum(0) if kept.ndim == 2 else torch.bincount(kept, minlength=self._num_classes)

    def with_partners(self, drawn: Tensor, epoch: int) -> Tensor:
        """Return the drawn ids, followed by the ids of the images that they are mixed with."""
        if not self._config.mixes(epoch):
            return drawn
        places = draw_partners(drawn, num_samples=len(self._kept), seed=self._seed, epoch=epoch)
        return torch.cat([drawn, self._kept[places]])

    def mix(self, batch: Batch, epoch: int) -> Batch:
        """Return the images [B, C, H, W] of `batch`, mixed with their partners.

        `batch` is of the ids of `with_partners`, and augmented. The targets of mixes are weights
        per class [B, K].
        """
        if not self._config.mixes(epoch):
            return batch
        drawn, _ = batch.sample_ids.chunk(2)
        images, others = batch.inputs.chunk(2)
        own, other = _weights_of(batch.targets, self._num_classes).chunk(2)
        height, width = images.shape[2:]
        pixel_weights, weights = draw_mix(
            self._config, drawn, height=height, width=width, seed=self._seed, epoch=epoch
        )
        targets = weights[:, None] * own + (1 - weights[:, None]) * other
        return Batch(torch.lerp(others, images, pixel_weights), targets, drawn)


def _weights_of(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels [B] or [B, K] as weights of the classes [B, K]."""
    return labels if labels.ndim == 2 else F.one_hot(labels, num_classes).float()
