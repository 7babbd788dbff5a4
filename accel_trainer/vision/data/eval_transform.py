"""From an encoded photo to the input of a model: the crop for evaluation, and the resize.

Shapes: B batch, H height, W width, S size of a model's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import ConfigError
from .photo_decode import decode_photo, read_header
from .pixels import Normalizer

Interpolation = Literal["bilinear", "bicubic"]
Views = Literal["none", "flip", "flip_crop"]

_MAX_SIZE = 2**14
_MAX_SHRINK = 8  # a JPEG is stored in blocks of 8 x 8 pixels
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


class Box(NamedTuple):
    """A part of a photo, in whole pixels: inside the photo and not empty."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """How a photo is evaluated: its centre square, resized, then normalised.

    Another program can follow these numbers: the square has `crop_ratio` of the shorter side
    (rounded half to even) and lies in the middle (rounded down); it is resized to S x S with
    antialiasing, in 8 bits. Where the square is at least 2 S, a JPEG is decoded at 1/2, 1/4 or 1/8
    of its size first, and colour profiles are not applied: without these two steps pixels may
    differ by a few levels of 255, and by more in fine patterns and in other colours than sRGB.
    """

    size: int
    """S, the height and width of the model's input in pixels."""
    crop_ratio: float = 0.875
    """The side of the centre square as a fraction (0..1) of the photo's shorter side."""
    mean: tuple[float, ...] = _IMAGENET_MEAN
    """Mean of each channel, for pixels in 0 to 1."""
    std: tuple[float, ...] = _IMAGENET_STD
    """Standard deviation of each channel, for pixels in 0 to 1."""
    interpolation: Interpolation = "bilinear"
    """The filter of the resize."""

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= _MAX_SIZE:
            raise ConfigError(
                "IMAGE_SIZE", f"--image-size is {self.size}: set it to 1 to {_MAX_SIZE} pixels"
            )
        if not 0 < self.crop_ratio <= 1:
            raise ConfigError(
                "CROP_RATIO", f"the crop ratio is {self.crop_ratio}: set it above 0 and at most 1"
            )
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(
                "INTERPOLATION",
                f"interpolation is {self.interpolation!r}: set it to bilinear or bicubic",
            )
        are_finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if len(self.mean) != 3 or len(self.std) != 3 or not are_finite or min(self.std) <= 0:
            raise ConfigError(
                "NORMALIZATION", f"mean {self.mean}, std {self.std}: give 3 each, std above 0"
            )

    def __call__(self, data: bytes, name: str) -> Tensor:
        """Return the pixels of an encoded photo, uint8 [S, S, 3].

        Raises DataError with `name`.
        """
        return crop_photo(data, name, self.box, size=self.size, interpolation=self.interpolation)

    def box(self, height: int, width: int) -> Box:
        """Return the part of an H x W photo that the model sees."""
        side = max(1, round(min(height, width) * self.crop_ratio))
        return Box((height - side) // 2, (width - side) // 2, side, side)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [B, S, S, 3] to float32 [B, 3, S, S], channels last in memory."""
        normalizer = Normalizer(
            self.mean,
            self.std,
            num_pixels=self.size**2,
            device=pixels.device,
        )
        return normalizer(pixels)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalTransform:
        """Return the transform that `to_dict` described. Raises ConfigError for other values."""
        try:
            return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})
        except (TypeError, KeyError) as error:
            raise ConfigError(
                "EVAL_TRANSFORM", f"not an evaluation transform ({error}): export the run again"
            ) from error


def crop_photo(
    data: bytes,
    name: str,
    box_of: Callable[[int, int], Box],
    *,
    size: int,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Decode a photo and resize its box `box_of(height, width)` to uint8 [S, S, 3], S = `size`.

    If the sides of the box are at least twice as long as needed, a JPEG is decoded at 1/2, 1/4 or
    1/8 of its size.
    """
    header = read_header(data, name)
    box = box_of(header.height, header.width)
    pixels = decode_photo(data, name, header=header, shrink=shrink_for(box, size))
    box = _scaled(box, header.height, header.width, pixels)
    return resize_box(pixels, box, size, interpolation)


def shrink_for(box: Box, size: int) -> int:
    """Return the divisor, 1, 2, 4 or 8, of the size at which a JPEG is decoded for this box."""
    shrink = 1
    while shrink < _MAX_SHRINK and min(box.height, box.width) >= 2 * shrink * size:
        shrink *= 2
    return shrink


def resize_box(
    pixels: NDArray[Any], box: Box, size: int, interpolation: Interpolation = "bilinear"
) -> Tensor:
    """Resize a box of uint8 [H, W, 3] to uint8 [S, S, 3], with antialiasing.

    Pixels outside the box have no influence.
    """
    part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    # torch resizes contiguous channels-last pixels almost twice as fast as a view.
    part = np.ascontiguousarray(part)
    images = torch.from_numpy(part).permute(2, 0, 1)[None]
    resized = F.interpolate(
        images, size=(size, size), mode=interpolation, antialias=True, align_corners=False
    )
    return resized[0].permute(1, 2, 0).contiguous()


def _scaled(box: Box, height: int, width: int, pixels: NDArray[Any]) -> Box:
    """Convert a box of an H x W photo to a box of `pixels`, the photo at that size or smaller."""
    if pixels.shape[:2] == (height, width):
        return box
    top = round(box.top * pixels.shape[0] / height)
    bottom = round((box.top + box.height) * pixels.shape[0] / height)
    left = round(box.left * pixels.shape[1] / width)
    right = round((box.left + box.width) * pixels.shape[1] / width)
    return Box(top, left, bottom - top, right - left)


def views_of(images: Tensor, tta: Views) -> list[Tensor]:
    """Return the views of images [B, C, H, W] over whose logits an evaluation averages.

    `flip_crop` is the six-view scheme of K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single
    GPU" (arXiv 2404.00498), with equal weights.
    """
    views = [images]
    if tta == "none":
        return views
    if tta == "flip_crop":
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        height, width = images.shape[-2:]
        views += [padded[..., 0:height, 0:width], padded[..., 2 : height + 2, 2 : width + 2]]
    return [view for image in views for view in (image, image.flip(-1))]
