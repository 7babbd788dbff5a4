"""Decodes images. A damaged or inconsistent image is an error that names it.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from ..sources.raw import RawImages, RawSplit

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class EncodedSplit:
    """Labels [N], and images as encoded bytes or paths. `name_of` describes a sample, for messages."""

    labels: NDArray[np.int64]
    encoded_at: Callable[[int], bytes | Path]
    name_of: Callable[[int], str]


def decoded(train: EncodedSplit, test: EncodedSplit, *, class_names: tuple[str, ...] | None) -> RawImages:
    """Decode both splits on demand. All images must have the size and mode of the first readable training image."""
    decoder = _decoder_for(train) if len(train.labels) else None

    def raw(split: EncodedSplit) -> RawSplit:
        def image_at(index: int) -> NDArray[np.uint8]:
            assert decoder is not None
            return decoder(split.encoded_at(index), name=split.name_of(index))

        return RawSplit(labels=split.labels, image_at=image_at, name_of=split.name_of)

    return RawImages(train=raw(train), test=raw(test), class_names=class_names)


def _decoder_for(split: EncodedSplit) -> Decoder:
    refused: DataError | None = None
    for index in range(len(split.labels)):
        try:
            return Decoder.like(split.encoded_at(index), name=split.name_of(index))
        except DataError as error:
            refused = refused or error
    assert refused is not None
    raise refused


@dataclass(frozen=True)
class Decoder:
    """Decodes images of one size and mode: `RGB`, or `L` for greyscale."""

    mode: str
    size: tuple[int, int]

    @classmethod
    def like(cls, encoded: bytes | Path, *, name: str) -> Decoder:
        """Return the decoder for a dataset whose first image is `encoded`."""
        with _opened(encoded, name) as image:
            return cls(_grey_or_rgb(image), image.size)

    def __call__(self, encoded: bytes | Path, *, name: str) -> NDArray[np.uint8]:
        """Return the pixels, uint8 [H, W, C]. `name` is used in errors."""
        with _opened(encoded, name) as image:
            # Checked before decoding: a few bytes can claim to be gigabytes of pixels.
            if image.size != self.size:
                raise DataError(
                    "DATA_IMAGE_SIZE",
                    f"{name} is {image.width}x{image.height} pixels, but the first image is "
                    f"{self.size[0]}x{self.size[1]}: give all images the same size",
                )
            if self.mode == "L" and _grey_or_rgb(image) != "L":
                raise DataError(
                    "DATA_IMAGE_MODE",
                    f"{name} is a colour image ({image.mode}), but the first is greyscale: give all the same mode",
                )
            pixels = np.asarray(image.convert(self.mode))
        return pixels.reshape(*pixels.shape[:2], -1)


def _grey_or_rgb(image: Image) -> str:
    return "L" if image.mode in ("1", "L") else "RGB"


@contextmanager
def _opened(encoded: bytes | Path, name: str) -> Iterator[Image]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
                yield image
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        reason = re.sub(r" <_io\.BytesIO.*?>", "", str(error))  # an address would differ each time
        raise DataError("DATA_IMAGE", f"{name} cannot be decoded ({reason}): replace or remove it") from error
