"""Random augmentation of photos as a pure function of (seed, epoch, sample id).

Shapes: B batch, H height, W width, S size of a model's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...core.config import FRACTION, NOT_NEGATIVE, POSITIVE, Range
from ...core.errors import ConfigError
from ...core.rng import fold_in
from ..data.eval_transform import Box, crop_photo
from ..data.photo_decode import Pixels
from .batch import BasicAugmentConfig, draw_placement
from .draws import random_uniform
from .photo_ops import MAX_MAGNITUDE, OPERATIONS, jitter_colors, operate

_CROP_TRIES = 10
_MAX_OPERATIONS = 10
_NUM_OPERATIONS = Range(
    "to 1 .. 10, or augment.policy to none",
    lambda number: 1 <= number <= _MAX_OPERATIONS,
)
_MAGNITUDE = Range(f"to 0 .. {MAX_MAGNITUDE}", lambda number: 0 <= number <= MAX_MAGNITUDE)


@dataclass(frozen=True, kw_only=True)
class PhotoAugmentConfig(BasicAugmentConfig):
    """Augmentation of training photos, different in each epoch.

    Evaluation photos are not augmented.
    """

    crop: Literal["random-resized", "padded", "none"] = "random-resized"
    """`random-resized`: a crop of random size and shape; `padded`: the centre square, moved by up
    to `crop_padding` pixels; `none`: the centre square."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a random-resized crop, as a fraction (0..1) of the photo."""
    crop_shape: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of a random-resized crop."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Largest change of brightness, contrast, saturation (fractions, each 0 or more) and hue
    (0..0.5)."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """`randaugment`: `num_operations` operations of strength `magnitude`; `trivialaugment`: one, of
    any strength."""
    num_operations: int = 2
    """Operations of `randaugment` per photo, at most 10."""
    magnitude: int = 9
    """Strength of `randaugment`, 0 to 30."""
    erase: float = 0.0
    """Probability (0..1) that a random box is set to the mean colour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        FRACTION.check(self, "augment", "crop_scale", "erase")
        POSITIVE.check(self, "augment", "crop_scale", "crop_shape")
        NOT_NEGATIVE.check(self, "augment", "color_jitter")
        for name in ("crop_scale", "crop_shape"):
            least, most = getattr(self, name)
            if least > most:
                fact = f"--augment.{name.replace('_', '-')} is {least} {most}"
                raise ConfigError("AUGMENT", f"{fact}: give the smaller number first")
        if self.color_jitter[3] > 0.5:
            fact = f"the hue of --augment.color-jitter is {self.color_jitter[3]}"
            raise ConfigError("AUGMENT", f"{fact}: set it to 0 .. 0.5")
        _NUM_OPERATIONS.check(self, "augment", "num_operations")
        _MAGNITUDE.check(self, "augment", "magnitude")


class Draw(IntEnum):
    """The number of the first random draw of each kind; `batch` uses the numbers below 32.

    Changing a number changes every result.
    """

    CROP_AREA = 32
    CROP_SHAPE = CROP_AREA + _CROP_TRIES
    CROP_TOP = CROP_SHAPE + _CROP_TRIES
    CROP_LEFT = CROP_TOP + 1
    JITTER = CROP_LEFT + 1  # the order, then the amount of each of the four changes
    OPERATION = JITTER + 5
    STRENGTH = OPERATION + _MAX_OPERATIONS  # of trivialaugment
    SIGN = STRENGTH + 1
    ERASE = SIGN + _MAX_OPERATIONS  # whether, area, shape, top, left
    END = ERASE + 5


class PhotoAugment:
    """The augmentation of one epoch: it turns encoded photos into S x S pixels.

    `size` is S, and `mean` (0..1 for each channel) is the colour of erased boxes.
    """

    def __init__(
        self,
        config: PhotoAugmentConfig,
        *,
        size: int,
        mean: Sequence[float],
        seed: int,
        epoch: int,
    ) -> None:
        self._config = config
        self._size = size
        self._seed = seed
        self._epoch = epoch
        self._color = tuple(round(255 * value) for value in mean)

    def draw(self, ids: Tensor) -> list[PhotoDraws]:
        """Draw the random numbers of the samples `ids` [B]."""
        config = self._config
        key = fold_in(self._seed, self._epoch)
        needed: list[int] = []
        if config.crop == "random-resized":
            needed += range(Draw.CROP_AREA, Draw.JITTER)
        if any(config.color_jitter):
            needed += range(Draw.JITTER, Draw.OPERATION)
        if config.policy != "none":
            needed += range(Draw.OPERATION, Draw.ERASE)
        if config.erase:
            needed += range(Draw.ERASE, Draw.END)
        numbers = np.zeros((len(ids), Draw.END - Draw.CROP_AREA))
        for draw in needed:
            numbers[:, draw - Draw.CROP_AREA] = random_uniform(key, ids, draw).numpy()
        place = draw_placement(config, ids, seed=self._seed, epoch=self._epoch)
        flips = [False] * len(ids) if place.flips is None else place.flips.tolist()
        samples = zip(
            numbers.tolist(),
            place.rows.tolist(),
            place.columns.tolist(),
            flips,
            strict=True,
        )
        return [
            PhotoDraws(uniform=uniform, row=row, column=column, is_flipped=flip)
            for uniform, row, column, flip in samples
        ]

    def __call__(self, data: bytes, name: str, draws: PhotoDraws) -> Tensor:
        """Return an encoded photo augmented, uint8 [S, S, 3]. Raises DataError with `name`."""
        config = self._config
        pixels = crop_photo(
            data,
            name,
            lambda height, width: self._box(height, width, draws),
            size=self._size,
        )
        if config.crop == "padded":
            pixels = _shifted(pixels, config, draws)
        if draws.is_flipped:
            pixels = pixels.flip(1)  # numpy's flip takes twenty times as long
        array: Pixels = pixels.numpy()
        if any(config.color_jitter):
            array = jitter_colors(array, config.color_jitter, draws.of(Draw.JITTER, 5))
        for operation, strength, sign in self._operations(draws):
            array = operate(
                array,
                OPERATIONS[operation],
                strength=strength,
                is_negative=sign,
                fill=self._color,
            )
        if config.erase and draws.of(Draw.ERASE, 1)[0] < config.erase:
            array = self._erased(array, draws)
        return torch.from_numpy(array)

    def _box(self, height: int, width: int, draws: PhotoDraws) -> Box:
        config = self._config
        if config.crop == "random-resized":
            return random_resized_box(
                height,
                width,
                scale=config.crop_scale,
                shape=config.crop_shape,
                draws=draws,
            )
        side = min(height, width)
        return Box((height - side) // 2, (width - side) // 2, side, side)

    def _operations(self, draws: PhotoDraws) -> list[tuple[int, float, bool]]:
        """Return each operation's index, strength (0..1), and whether its sign is negative."""
        config = self._config
        if config.policy == "none":
            return []
        if config.policy == "randaugment":
            number = config.num_operations
            strength = config.magnitude / MAX_MAGNITUDE
        else:
            number = 1
            strength = int(draws.of(Draw.STRENGTH, 1)[0] * (MAX_MAGNITUDE + 1)) / MAX_MAGNITUDE
        chosen = draws.of(Draw.OPERATION, number)
        signs = draws.of(Draw.SIGN, number)
        return [
            (int(which * len(OPERATIONS)), strength, sign < 0.5)
            for which, sign in zip(chosen, signs, strict=True)
        ]

    def _erased(self, array: Pixels, draws: PhotoDraws) -> Pixels:
        """Set a box to the mean colour: 2 to 33 % of the area, 0.3 to 3.3 times as high as wide."""
        _, area, shape, top, left = draws.of(Draw.ERASE, 5)
        size = self._size
        pixels = _between(0.02, 0.33, area) * size * size
        ratio = math.exp(_between(math.log(0.3), math.log(3.3), shape))
        height = min(size, max(1, round(math.sqrt(pixels * ratio))))
        width = min(size, max(1, round(math.sqrt(pixels / ratio))))
        row = int(top * (size - height + 1))
        column = int(left * (size - width + 1))
        array = array.copy()
        array[row : row + height, column : column + width] = self._color
        return array


@dataclass(frozen=True, slots=True, kw_only=True)
class PhotoDraws:
    """The random numbers of one sample.

    `uniform` are in 0..1, in the order of `Draw`; `row` and `column` place a padded crop.
    """

    uniform: list[float]
    row: int
    column: int
    is_flipped: bool

    def of(self, draw: int, count: int) -> list[float]:
        """Return `count` uniform numbers, from number `draw` on."""
        first = draw - Draw.CROP_AREA
        return self.uniform[first : first + count]


def random_resized_box(
    height: int,
    width: int,
    *,
    scale: tuple[float, float],
    shape: tuple[float, float],
    draws: PhotoDraws,
) -> Box:
    """Return a box of random area and shape in an H x W photo.

    Ten boxes are drawn, and the first that fits is returned. If none fits, the box is the largest
    one in the centre with a permitted shape.
    """
    areas = draws.of(Draw.CROP_AREA, _CROP_TRIES)
    ratios = draws.of(Draw.CROP_SHAPE, _CROP_TRIES)
    top, left = draws.of(Draw.CROP_TOP, 2)
    for area, ratio in zip(areas, ratios, strict=True):
        pixels = _between(*scale, area) * height * width
        aspect = math.exp(_between(math.log(shape[0]), math.log(shape[1]), ratio))
        rows = round(math.sqrt(pixels / aspect))
        columns = round(math.sqrt(pixels * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            row = int(top * (height - rows + 1))
            column = int(left * (width - columns + 1))
            return Box(row, column, rows, columns)
    aspect = min(max(width / height, shape[0]), shape[1])
    rows = min(height, max(1, round(width / aspect)))
    columns = min(width, max(1, round(height * aspect)))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def _between(least: float, most: float, number: float) -> float:
    return least + (most - least) * number


def _shifted(pixels: Tensor, config: PhotoAugmentConfig, draws: PhotoDraws) -> Tensor:
    """Pad the S x S photo on each side and cut S x S pixels out of it."""
    size = len(pixels)
    pad = config.crop_padding
    border = ((pad, pad), (pad, pad), (0, 0))
    padded = np.pad(pixels, border, mode="reflect" if config.crop_mode == "reflect" else "constant")
    window = slice(draws.row, draws.row + size), slice(draws.column, draws.column + size)
    return torch.from_numpy(padded)[window]
