"""Decodes photos of any size and mode to RGB.

A photo that cannot be decoded is an error that names it.

Shapes: H height, W width.
"""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError

MAX_PIXELS = 2**27
"""The largest H * W that is decoded: a few bytes can claim to be gigabytes of pixels."""

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")
"""The formats that are decoded, by Pillow's names. Others are refused: Pillow hands PostScript to
Ghostscript, which runs it as a program."""

_LISTED = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} format"
# Enough for a photo with the most pixels; a sparse file may claim to be larger than the memory.
_MAX_FILE_BYTES = 2**31
_ORIENTATION = 0x0112  # a tag of EXIF
_START_OF_SCAN = 0xDA  # markers of JPEG's segments
_APP1 = 0xE1
_EXIF = b"Exif\0\0"


class PhotoHeader(NamedTuple):
    """What is known before decoding.

    `height` and `width` are of the upright photo, `orientation` is EXIF's (1..8), and a plain JPEG
    is decoded by simplejpeg.
    """

    height: int
    width: int
    orientation: int
    is_plain_jpeg: bool


def decoder_version() -> str:
    """Return the decoders and their versions, on which the pixels of a file may depend."""
    import PIL

    fast = _simplejpeg()
    return f"pillow {PIL.__version__}" + (f", simplejpeg {fast.__version__}" if fast else "")


def photo_suffixes() -> set[str]:
    """Return the file suffixes of `FORMATS`, in small letters and with the dot."""
    from PIL import Image

    return {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}


def read_photo(path: Path, name: str) -> bytes:
    """Return the content of a file, or of what it links to. Raises DataError with `name`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe may never end
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {_MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            "DATA_IMAGE", f"{name} cannot be read ({error.strerror}): restore or remove it"
        ) from error


def read_header(data: bytes, name: str) -> PhotoHeader:
    """Return the size of an encoded photo. Raises DataError if it is not an image, or too large."""
    header = _jpeg_header(data) or _other_header(data, name)
    if header.height * header.width > MAX_PIXELS:
        fact = f"{name} is {header.width}x{header.height} pixels, more than {MAX_PIXELS:,} in all"
        raise DataError("DATA_IMAGE_LARGE", f"{fact}: make it smaller or remove it")
    return header


def decode_photo(
    data: bytes, name: str, *, header: PhotoHeader | None = None, shrink: int = 1
) -> NDArray[np.uint8]:
    """Return the upright pixels, uint8 [H, W, 3], contiguous and writable.

    Grey becomes RGB, 16 bits become 8, transparent pixels become white. With `shrink` 2, 4 or 8 a
    JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which is cheaper; other formats are not shrunk.
    `header` saves reading it again.

    Raises:
        DataError: the photo `name` is damaged, not an image, or too large.
    """
    header = header or read_header(data, name)
    pixels = _decode_plain_jpeg(data, header, shrink) if header.is_plain_jpeg else None
    return _decode_with_pillow(data, name) if pixels is None else pixels


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _jpeg_header(data: bytes) -> PhotoHeader | None:
    """Return the header of a colour or grey JPEG, None for anything else."""
    if data[:2] != b"\xff\xd8" or _simplejpeg() is None:
        return None
    try:
        height, width, colours, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    if colours not in ("YCbCr", "Gray"):
        return None
    orientation = _jpeg_orientation(data)
    if orientation >= 5:
        height, width = width, height
    return PhotoHeader(height, width, orientation, is_plain_jpeg=True)


def _jpeg_orientation(data: bytes) -> int:
    """Find the EXIF orientation in the segments before the pixels: Pillow would take longer."""
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF and data[place + 1] != _START_OF_SCAN:
        (length,) = struct.unpack_from(">H", data, place + 2)
        if data[place + 1] == _APP1 and data.startswith(_EXIF, place + 4):
            return _orientation_of(partial(_loaded_exif, data[place + 4 : place + 2 + length]))
        place += 2 + length
    return 1


def _loaded_exif(data: bytes) -> Any:
    from PIL import Image

    exif = Image.Exif()
    exif.load(data)
    return exif


def _orientation_of(load: Callable[[], Any]) -> int:
    """Return the orientation in the EXIF data that `load` reads; 1 if it is missing or damaged."""
    try:
        value = load().get(_ORIENTATION, 1)
    except Exception:  # Pillow's parser raises errors of any type; the pixels may be fine
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode_plain_jpeg(data: bytes, header: PhotoHeader, shrink: int) -> NDArray[np.uint8] | None:
    """Return the pixels; None for a faulty file, as Pillow may tolerate or explain the fault."""
    height, width = header.height, header.width
    if header.orientation >= 5:
        height, width = width, height
    smallest = {}
    if shrink > 1:
        smallest = {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
    try:
        pixels = _simplejpeg().decode_jpeg(data, "RGB", **smallest)
    except ValueError:
        return None
    return _upright(pixels, header.orientation)


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _other_header(data: bytes, name: str) -> PhotoHeader:
    with opened_image(data, name) as image:
        width, height = image.size
        # Pillow turns a TIFF upright itself.
        orientation = 1 if image.format == "TIFF" else _orientation_of(image.getexif)
    if orientation >= 5:
        width, height = height, width
    return PhotoHeader(height, width, orientation, is_plain_jpeg=False)


def _decode_with_pillow(data: bytes, name: str) -> NDArray[np.uint8]:
    with opened_image(data, name) as image:
        image.load()
        orientation = _orientation_of(image.getexif)
        return _upright(_rgb(image), orientation)


def _rgb(image: Any) -> NDArray[np.uint8]:
    from PIL import Image

    if image.mode.startswith("I"):  # 16-bit greyscale, perhaps stored in 32 bits
        grey = (np.clip(np.array(image), 0, 2**16 - 1) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


@contextmanager
def opened_image(encoded: bytes, name: str) -> Iterator[Any]:
    """Open an image in one of `FORMATS`; all images are opened here.

    Errors that Pillow raises in the block become a DataError with `name`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(encoded), formats=FORMATS) as image:
            yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            "DATA_IMAGE_LARGE", f"{name} has too many pixels ({error}): make it smaller"
        ) from error
    except Exception as error:  # Pillow's decoders raise errors of any type for damaged files
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # its message has an address in memory
            reason = f"it is not an image in {_LISTED}"
        raise DataError(
            "DATA_IMAGE", f"{name} cannot be decoded ({reason}): replace or remove it"
        ) from error
