"""Random augmentation of images as a pure function of (seed, epoch, sample id).

It has no state to save, and a sample's augmentation depends neither on its batch nor on its
process.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.config import NOT_NEGATIVE, Config
from ...core.rng import fold_in
from .draws import random_bits, random_int, random_uniform

_MAX_SIMD_ELEMENTS = 32  # two AVX-512 vectors, which torch processes at once


@dataclass(frozen=True, kw_only=True)
class BasicAugmentConfig(Config):
    """The augmentation settings that small images and photos share."""

    crop_padding: int = 4
    """Pixels added on each side before a random crop of the original size; 0: no crop."""
    crop_mode: Literal["reflect", "zero"] = "reflect"
    """The added pixels: the mirrored image, or black."""
    flip: Literal["none", "random", "alternating"] = "random"
    """Left-right flips: `random` in each epoch, or `alternating` between epochs with a random
    start."""
    mixup: float = 0.0
    """Blend with another training image, in a proportion from Beta(mixup, mixup); 0: no
    blending."""
    cutmix: float = 0.0
    """Paste a box of another training image, with area from Beta(cutmix, cutmix); with mixup,
    either at random."""
    mix_epochs: int | None = None
    """Mix images in this many epochs only, from the first on; None: in all."""

    def __post_init__(self) -> None:
        NOT_NEGATIVE.check(self, "augment", "crop_padding", "mixup", "cutmix", "mix_epochs")

    def mixes(self, epoch: int) -> bool:
        """Whether images are mixed in `epoch`, so that targets are weights per class."""
        is_over = self.mix_epochs is not None and epoch >= self.mix_epochs
        return not is_over and (self.mixup > 0 or self.cutmix > 0)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(BasicAugmentConfig):
    """Augmentation of training images, different in each epoch.

    Evaluation images are not augmented.
    """

    cutout: int = 0
    """Side in pixels of a randomly placed square that is set to the mean colour; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        NOT_NEGATIVE.check(self, "augment", "cutout")


class _Draw(IntEnum):
    """The number of each random draw of a sample. Reordering changes every result."""

    CROP_ROW = auto()
    CROP_COLUMN = auto()
    FLIP = auto()
    CUTOUT_ROW = auto()
    CUTOUT_COLUMN = auto()
    PARTNER = auto()
    MIX_KIND = auto()
    BETA_RADIUS = auto()
    BETA_ANGLE = auto()
    BOX_ROW = auto()
    BOX_COLUMN = auto()


@dataclass(frozen=True, slots=True)
class Placement:
    """Crops and flips, [B] each: first row and column in the padded image, and whether to flip."""

    rows: Tensor
    columns: Tensor
    flips: Tensor | None

    def between(self, start: int, stop: int) -> Placement:
        """Return the placements from `start` up to `stop`, as views."""
        flips = None if self.flips is None else self.flips[start:stop]
        return Placement(self.rows[start:stop], self.columns[start:stop], flips)


def draw_placement(
    config: BasicAugmentConfig, sample_ids: Tensor, *, seed: int, epoch: int
) -> Placement:
    """Draw the crop and the flip of samples [B], on the device of `sample_ids`."""
    key = fold_in(seed, epoch)
    positions = 2 * config.crop_padding + 1
    return Placement(
        rows=random_int(key, sample_ids, _Draw.CROP_ROW, high=positions),
        columns=random_int(key, sample_ids, _Draw.CROP_COLUMN, high=positions),
        flips=_draw_flips(config, sample_ids, seed=seed, epoch=epoch),
    )


def _draw_flips(
    config: BasicAugmentConfig, sample_ids: Tensor, *, seed: int, epoch: int
) -> Tensor | None:
    if config.flip == "none":
        return None
    if config.flip == "random":
        return random_bits(fold_in(seed, epoch), sample_ids, _Draw.FLIP) & 1 != 0
    # The key does not include the epoch: the first side is random per image, then they alternate.
    return (random_bits(fold_in(seed), sample_ids, _Draw.FLIP) + epoch) & 1 != 0


def cut_out(
    config: AugmentConfig, images: Tensor, sample_ids: Tensor, *, seed: int, epoch: int
) -> Tensor:
    """Set a square in each normalised image [B, C, H, W] to 0 (the mean), in place.

    The square may cross the border of the image.
    """
    if config.cutout == 0:
        return images
    key = fold_in(seed, epoch)
    height, width = images.shape[2:]
    mask = _box_mask(
        random_int(key, sample_ids, _Draw.CUTOUT_ROW, high=height) - config.cutout // 2,
        random_int(key, sample_ids, _Draw.CUTOUT_COLUMN, high=width) - config.cutout // 2,
        torch.full_like(sample_ids, config.cutout),
        torch.full_like(sample_ids, config.cutout),
        height=height,
        width=width,
    )
    return images.masked_fill_(mask, 0.0)


def draw_partners(sample_ids: Tensor, *, num_samples: int, seed: int, epoch: int) -> Tensor:
    """Draw the second image of each mix from the whole training set: ids [B]."""
    return random_int(fold_in(seed, epoch), sample_ids, _Draw.PARTNER, high=num_samples)


def draw_mix(
    config: BasicAugmentConfig,
    sample_ids: Tensor,
    *,
    height: int,
    width: int,
    seed: int,
    epoch: int,
) -> tuple[Tensor, Tensor]:
    """Draw the weight of each sample in its mix: per pixel [B, 1, H, W], and for its target [B]."""
    key = fold_in(seed, epoch)
    whole = sample_ids.new_ones((len(sample_ids), 1, height, width), dtype=torch.float32)
    if config.mixup > 0:
        weight = _draw_beta(key, sample_ids, alpha=config.mixup)
        blend = whole * weight[:, None, None, None]
        if config.cutmix == 0:
            return blend, weight
    weight = _draw_beta(key, sample_ids, alpha=config.cutmix)
    side = (1 - weight).sqrt()
    heights = (side * height).round().long()
    widths = (side * width).round().long()
    box = _box_mask(
        random_int(key, sample_ids, _Draw.BOX_ROW, high=height) - heights // 2,
        random_int(key, sample_ids, _Draw.BOX_COLUMN, high=width) - widths // 2,
        heights,
        widths,
        height=height,
        width=width,
    )
    weights = whole.masked_fill(box, 0.0)
    if config.mixup > 0:
        is_blend = random_bits(key, sample_ids, _Draw.MIX_KIND) & 1 != 0
        weights = torch.where(is_blend[:, None, None, None], blend, weights)
    # The target's weight is counted in pixels: a box that crosses the border pastes fewer.
    return weights, weights.mean((1, 2, 3))


def _box_mask(
    rows: Tensor, columns: Tensor, heights: Tensor, widths: Tensor, *, height: int, width: int
) -> Tensor:
    """Return bool [B, 1, H, W], true inside boxes: their first row, first column and size, [B]."""
    row = torch.arange(height, device=rows.device)
    column = torch.arange(width, device=rows.device)
    in_rows = (row >= rows[:, None]) & (row < (rows + heights)[:, None])
    in_columns = (column >= columns[:, None]) & (column < (columns + widths)[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _draw_beta(key: int, sample_ids: Tensor, *, alpha: float) -> Tensor:
    """Draw float32 [B] in [0, 1] from Beta(alpha, alpha), for any alpha > 0, without rejection.

    Bailey's polar method (Math. Comp. 62, 1994) computes an exact Student t with 2 * alpha degrees
    of freedom from two uniforms; t / sqrt(2 * alpha + t**2) is then a symmetric Beta on (-1, 1).
    The formula is multiplied out, so that small alphas do not overflow.
    """
    # The base is above 0, so this is never 0 ** 0.
    radius = _power(1 - random_uniform(key, sample_ids, _Draw.BETA_RADIUS), 1 / alpha)
    cosine = torch.cos(2 * math.pi * random_uniform(key, sample_ids, _Draw.BETA_ANGLE))
    root = cosine * (1 - radius).sqrt()
    # MKL's square root is not correctly rounded on some CPUs: the result can leave [0, 1] by 6e-8.
    return ((1 + root / (radius + root**2).sqrt()) / 2).clamp(0, 1)


def _power(base: Tensor, exponent: float) -> Tensor:
    """Return base ** exponent [B], rounded the same at every position in a batch."""
    # On a CPU, torch computes the last elements, which do not fill a SIMD vector, with a routine
    # that rounds differently (torch 2.13). The padding keeps the elements of `base` away from it.
    return F.pad(base, (0, _MAX_SIMD_ELEMENTS)).pow(exponent)[: len(base)]
