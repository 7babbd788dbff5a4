"""Decodes small images. A damaged or inconsistent image is an error that names it.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import DataError
from ..sources.class_names import Names
from ..sources.raw import PhotoSplit, RawImages, RawSplit
from .photo_decode import Pixels, decode_photo, read_header

_MAX_PIXELS = 2**24  # of small images, which are all decoded at the start


def decode_on_demand(train: PhotoSplit, test: PhotoSplit, *, class_names: Names) -> RawImages:
    """Return both splits, whose images are decoded when they are read.

    All images must have the size and number of channels of the first readable training image.
    """
    decoder = _decoder_for(train) if len(train.labels) else None

    def raw(split: PhotoSplit) -> RawSplit:
        def image_at(index: int) -> Pixels:
            assert decoder is not None
            return decoder(split.encoded_at(index), name=split.name_of(index))

        return RawSplit(labels=split.labels, image_at=image_at, name_of=split.name_of)

    return RawImages(train=raw(train), test=raw(test), class_names=class_names)


def _decoder_for(split: PhotoSplit) -> Decoder:
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
    """Decodes images of H x W pixels, to C channels: 3, or 1 for greyscale."""

    height: int
    width: int
    num_channels: int

    @classmethod
    def for_first_image(cls, data: bytes, *, name: str) -> Decoder:
        """Return the decoder for a dataset whose first image is `data`."""
        header = read_header(data, name)
        if header.width * header.height > _MAX_PIXELS:
            size = f"{header.width}x{header.height} pixels"
            fact = f"{name} is {size}, more than {_MAX_PIXELS:,} in total"
            raise DataError("DATA_IMAGE_LARGE", f"{fact}: make the images smaller")
        return cls(header.height, header.width, num_channels=1 if header.is_grey else 3)

    def __call__(self, data: bytes, *, name: str) -> Pixels:
        """Return the pixels, uint8 [H, W, C]. `name` is used in errors."""
        header = read_header(data, name)
        # Checked before decoding: a few bytes can claim to be gigabytes of pixels.
        if (header.height, header.width) != (self.height, self.width):
            raise DataError(
                "DATA_IMAGE_SIZE",
                f"{name} is {header.width}x{header.height} pixels, but the first image is "
                f"{self.width}x{self.height}: give all images the same size",
            )
        if self.num_channels == 1 and not header.is_grey:
            fact = f"{name} is a colour image, but the first image is greyscale"
            raise DataError("DATA_IMAGE_MODE", f"{fact}: give all the same mode")
        return decode_photo(data, name, header=header)[..., : self.num_channels]
