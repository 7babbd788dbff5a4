"""Decodes small images. A damaged or inconsistent image is an error that names it.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from ..sources.raw import RawImages, RawSplit
from .photo_decode import opened_image, read_photo

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_PIXELS = 2**24  # of small images, which are all decoded at the start


@dataclass(frozen=True, kw_only=True)
class EncodedSplit:
    """Labels [N], and images as encoded bytes or paths.

    `name_of` describes a sample, for messages.
    """

    labels: NDArray[np.int64]
    encoded_at: Callable[[int], bytes | Path]
    name_of: Callable[[int], str]


def decode_on_demand(
    train: EncodedSplit, test: EncodedSplit, *, class_names: tuple[str, ...] | None
) -> RawImages:
    """Return both splits, whose images are decoded when they are read.

    All images must have the size and mode of the first readable training image.
    """
    decoder = _decoder_for(train) if len(train.labels) else None

    def raw(split: EncodedSplit) -> RawSplit:
        def image_at(index: int) -> NDArray[np.uint8]:
            assert decoder is not None
            return decoder(split.encoded_at(index), name=split.name_of(index))

        return RawSplit(labels=split.labels, image_at=image_at, name_of=split.name_of)

    return RawImages(train=raw(train), test=raw(test), class_names=class_names)


def _decoder_for(split: EncodedSplit) -> Decoder:
    first_error: DataError | None = None
    for index in range(len(split.labels)):
        try:
            return Decoder.for_first_image(split.encoded_at(index), name=split.name_of(index))
        except DataError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


@dataclass(frozen=True)
class Decoder:
    """Decodes images of one size and mode: `RGB`, or `L` for greyscale."""

    mode: str
    size: tuple[int, int]

    @classmethod
    def for_first_image(cls, encoded: bytes | Path, *, name: str) -> Decoder:
        """Return the decoder for a dataset whose first image is `encoded`."""
        with opened_image(_bytes_of(encoded, name), name) as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width}x{image.height} pixels"
                fact = f"{name} is {size}, more than {_MAX_PIXELS:,} in all"
                raise DataError("DATA_IMAGE_LARGE", f"{fact}: make the images smaller")
            return cls(_grey_or_rgb(image), image.size)

    def __call__(self, encoded: bytes | Path, *, name: str) -> NDArray[np.uint8]:
        """Return the pixels, uint8 [H, W, C]. `name` is used in errors."""
        with opened_image(_bytes_of(encoded, name), name) as image:
            # Checked before decoding: a few bytes can claim to be gigabytes of pixels.
            if image.size != self.size:
                raise DataError(
                    "DATA_IMAGE_SIZE",
                    f"{name} is {image.width}x{image.height} pixels, but the first image is "
                    f"{self.size[0]}x{self.size[1]}: give all images the same size",
                )
            if self.mode == "L" and _grey_or_rgb(image) != "L":
                fact = f"{name} is a colour image ({image.mode}), but the first is greyscale"
                raise DataError("DATA_IMAGE_MODE", f"{fact}: give all the same mode")
            pixels = np.asarray(image.convert(self.mode))
        return pixels.reshape(*pixels.shape[:2], -1)


def _bytes_of(encoded: bytes | Path, name: str) -> bytes:
    return read_photo(encoded, name) if isinstance(encoded, Path) else encoded


def _grey_or_rgb(image: Image) -> str:
    return "L" if image.mode in ("1", "L") else "RGB"
