"""Decodes photos of any size and mode to RGB.

A photo that cannot be decoded is an error that names it.

Shapes: H height, W width.
"""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError

Pixels = NDArray[np.uint8]
"""The pixels of an image, [H, W, C]."""

MAX_PIXELS = 2**27
"""The largest H * W that is decoded: a few bytes can claim to be gigabytes of pixels."""

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")
"""The formats that are decoded, by Pillow's names. Others are refused: Pillow hands PostScript to
Ghostscript, which runs it as a program."""

_OTHER_FILES = {
    b"pk\3\4": "a zip archive: extract it",
    b"\x1f\x8b": "a gzip archive: extract it",
    b"rar!": "a rar archive: extract it",
    b"%pdf": "a PDF",
    b"<!doctype": "a page of the web",
    b"<html": "a page of the web",
    b"version https://git-lfs": "a pointer of Git LFS: run git lfs pull",
}
# Enough for a photo with the most pixels; a sparse file may claim to be larger than the memory.
_MAX_FILE_BYTES = 2**31
_ORIENTATION = 0x0112  # a tag of EXIF
_START_OF_SCAN = 0xDA  # markers of JPEG's segments
_APP1 = 0xE1
_APP1_STARTS = {"exif": b"Exif\0\0", "xmp": b"http://ns.adobe.com/xap/1.0/\0"}
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how a file begins
_BITS_PER_SAMPLE = 258  # tags of TIFF
_PHOTOMETRIC = 262
_NUM_BANDS = 277
_PLANAR_CONFIGURATION = 284
_EXTRA_SAMPLES = 338
_SAMPLE_FORMAT = 339
_WHITE_IS_ZERO = 0
_IN_PLANES = 2
_SIGNED = 2
_LEAST_OF_16_BITS = 2**13  # of 0 to 65,535, an eighth
# The chunks of a PNG that may have an orientation.
_EXIF_IN_PNG = (b"eXIf", b"tEXtRaw profile", b"zTXtRaw profile", b"iTXtXML:com.adobe.xmp")


class PhotoHeader(NamedTuple):
    """What is known before decoding.

    `height` and `width` are of the upright photo, `orientation` is EXIF's (1..8), a grey photo has
    no channels but one of grey, and a plain JPEG is decoded by simplejpeg.
    """

    height: int
    width: int
    orientation: int
    is_grey: bool
    is_plain_jpeg: bool


def decoder_version() -> str:
    """Return the decoders and their versions, on which the pixels of a file may depend."""
    import PIL

    fast = _simplejpeg()
    return f"pillow {PIL.__version__}" + (f", simplejpeg {fast.__version__}" if fast else "")


@cache
def photo_suffixes() -> frozenset[str]:
    """Return the file suffixes of `FORMATS`, in small letters and with the dot."""
    from PIL import Image

    known = Image.registered_extensions().items()
    return frozenset(suffix for suffix, kind in known if kind in FORMATS)


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
            "DATA_IMAGE",
            f"{name} cannot be read ({error.strerror}): correct the path, or leave it out",
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
) -> Pixels:
    """Return the upright pixels, uint8 [H, W, 3], contiguous and writable.

    Grey becomes RGB, transparent pixels become white, and of more than 8 bits the upper 8 are
    kept: the range is that of the format, whatever part of it a photo uses. With `shrink` 2, 4 or 8
    a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which is cheaper; other formats are not
    shrunk. `header` saves reading it again.

    Raises:
        DataError: the photo `name` is damaged, not an image, or too large, or its format does not
            say what is black and what is white: floating-point pixels, and signed or 32-bit ones
            that do not look like 16 bits.
    """
    header = header or read_header(data, name)
    pixels = _decode_plain_jpeg(data, header, shrink) if header.is_plain_jpeg else None
    return _decode_with_pillow(data, name) if pixels is None else pixels


def format_of(data: bytes, name: str) -> str:
    """Return format and mode by Pillow's names, such as `PNG RGB`, or `PNG RGB;16` of 16 bits.

    Raises DataError.
    """
    if header := _jpeg_header(data):
        return "JPEG L" if header.is_grey else "JPEG RGB"
    with opened_image(data, name) as image:
        is_deep = ";" not in image.mode and _bits_of_channel(image, data) == 16
        return f"{image.format} {image.mode}{';16' * is_deep}"


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
    return PhotoHeader(height, width, orientation, colours == "Gray", is_plain_jpeg=True)


def _jpeg_orientation(data: bytes) -> int:
    """Find the orientation in the segments before the pixels: Pillow would take longer."""
    found: dict[str, bytes] = {}
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF and data[place + 1] != _START_OF_SCAN:
        if data[place + 1] == 0xFF:  # any number of these may stand before a marker
            place += 1
            continue
        (length,) = struct.unpack_from(">H", data, place + 2)
        for name, start in _APP1_STARTS.items():
            if data[place + 1] == _APP1 and data.startswith(start, place + 4):
                found.setdefault(name, data[place + 4 : place + 2 + length])
        place += 2 + length
    return _orientation_of(partial(_read_exif, found)) if found else 1


def _read_exif(found: Mapping[str, bytes]) -> Any:
    """Return what Pillow reads in the EXIF data and the XMP of a file: the former comes first."""
    from PIL import Image

    image = Image.Image()
    image.info.update(found)
    return image.getexif()


def _orientation_of(load: Callable[[], Any]) -> int:
    """Return the orientation in the EXIF data that `load` reads; 1 if it is missing or damaged."""
    try:
        value = load().get(_ORIENTATION, 1)
    except Exception:  # Pillow's parser raises errors of any type; the pixels may be fine
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode_plain_jpeg(data: bytes, header: PhotoHeader, shrink: int) -> Pixels | None:
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


def _upright(pixels: Pixels, orientation: int) -> Pixels:
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
        is_grey = image.mode in ("1", "L") or image.mode.startswith("I")
        orientation = _other_orientation(image, data)
    if orientation >= 5:
        width, height = height, width
    return PhotoHeader(height, width, orientation, is_grey, is_plain_jpeg=False)


def _other_orientation(image: Any, data: bytes) -> int:
    if image.format == "TIFF":  # Pillow turns it upright itself
        return 1
    if image.format == "PNG" and not _has_exif(data):
        return 1  # Pillow would decode the pixels to see what comes after them
    return _orientation_of(image.getexif)


def _has_exif(png: bytes) -> bool:
    place = 8
    while place + 4 <= len(png) and not png.startswith(_EXIF_IN_PNG, place + 4):
        (length,) = struct.unpack_from(">I", png, place)
        place += 12 + length
    return place + 4 <= len(png)


def _decode_with_pillow(data: bytes, name: str) -> Pixels:
    with opened_image(data, name) as image:
        try:
            pixels = _rgb(image, data)
        except _UnknownRangeError as error:
            fact = f"{name} cannot be decoded ({error} have no fixed range)"
            raise DataError(
                "DATA_IMAGE",
                f"{fact}: scale them to 0 to 255, and save the image in 8 bits, as PNG",
            ) from None
        return _upright(pixels, _other_orientation(image, data))


class _UnknownRangeError(ValueError):
    """Nobody can know which value of these pixels is black and which is white."""


def _tag(image: Any, number: int) -> tuple[int, ...]:
    """Return the values of a TIFF's tag, which may be none."""
    values = image.tag_v2.get(number, ())
    return values if isinstance(values, tuple) else (values,)


def _bits_of_channel(image: Any, data: bytes) -> int:
    """Return how many bits a PNG or TIFF stores for a channel; 8 for other formats."""
    if image.format == "PNG":
        return data[24]
    return max(_tag(image, _BITS_PER_SAMPLE), default=1) if image.format == "TIFF" else 8


def _rgb(image: Any, data: bytes) -> Pixels:
    from PIL import Image

    if image.mode == "F":
        raise _UnknownRangeError("floating-point pixels")
    if image.mode.startswith("I"):
        return _deep_grey(image, data)
    if image.format == "PNG" and isinstance(image.info.get("transparency"), int | tuple):
        num_bits = _bits_of_channel(image, data)
        if image.mode == "RGB" and num_bits == 16:
            return _deep_colour(image, data)
        if image.mode == "L":  # Pillow scales the pixels to 8 bits, and not the transparent one
            image.info["transparency"] *= 255 // (2**num_bits - 1)
    if _has_alpha(image, data):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _has_alpha(image: Any, data: bytes) -> bool:
    """Return whether pixels may be transparent: a fourth band of a TIFF may be other light.

    Raises ValueError for a TIFF whose range is unknown, or that Pillow misreads.
    """
    if image.format != "TIFF":
        return bool(image.has_transparency_data)
    if _SIGNED in _tag(image, _SAMPLE_FORMAT):
        raise _UnknownRangeError("signed pixels")
    has_alpha = bool(_tag(image, _EXTRA_SAMPLES))
    if _IN_PLANES in _tag(image, _PLANAR_CONFIGURATION):
        is_raw = image.tile[0][0] == "raw"
        is_deep = _bits_of_channel(image, data) > 8
        if is_deep if is_raw else image.mode == "RGBA" and not has_alpha:
            raise ValueError("Pillow misreads its planes")
    return has_alpha and bool(image.has_transparency_data)


def _deep_grey(image: Any, data: bytes) -> Pixels:
    """Return the pixels of a photo with more than 8 bits of grey."""
    stored = np.array(image)  # [H, W], uint16 or int32
    num_bits = 16
    is_tiff = image.format == "TIFF"
    if is_tiff and image.mode == "I":  # signed or 32 bits: some tools store 16 bits in these
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or not _LEAST_OF_16_BITS <= high < 2**16:
            raise _UnknownRangeError(f"signed or 32-bit pixels of {low:,} to {high:,}")
    elif is_tiff:
        num_bits = _bits_of_channel(image, data)
    grey = (stored >> (num_bits - 8)).astype(np.uint8)
    if is_tiff and _WHITE_IS_ZERO in _tag(image, _PHOTOMETRIC):
        grey = 255 - grey
    grey[stored == image.info.get("transparency", -1)] = 255
    return np.repeat(grey[:, :, None], 3, axis=2)


def _deep_colour(image: Any, data: bytes) -> Pixels:
    """Return the pixels of a 16-bit RGB PNG with a transparent colour.

    Pillow keeps the upper bytes of the pixels; it finds the lower ones in the other byte order.
    """
    pixels = np.array(image)
    with opened_image(data, "") as again:
        again.tile = [(*tile[:3], "RGB;16L") for tile in again.tile]
        stored = pixels * np.uint16(256) + np.array(again)
    pixels[(stored == image.info["transparency"]).all(2)] = 255
    return pixels


def _kind_of_tiff(encoded: bytes) -> str:
    """Describe a TIFF that cannot be read, such as one with bands of other light than ours."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    tags = ImageFileDirectory_v2(encoded[:8])
    with suppress(Exception):  # of any type, for a damaged file
        file = BytesIO(encoded)
        file.seek(tags.next)
        tags.load(file)
        bits = ", ".join(map(str, sorted(set(tags[_BITS_PER_SAMPLE]))))
        return f"a TIFF of {tags[_NUM_BANDS]} bands of {bits} bits, which Pillow cannot read"
    return "a kind of TIFF that Pillow cannot read"


def _no_image(encoded: bytes) -> str:
    """Say that something is no image, and what it may be instead."""
    start = encoded[:64].lstrip().lower()
    kinds = (kind for beginning, kind in _OTHER_FILES.items() if start.startswith(beginning))
    other = next(kinds, None if start else "an empty file")
    return f"it is not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]} format" + (
        f", but {other}" if other else ""
    )


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
            reason = _kind_of_tiff(encoded) if encoded.startswith(_TIFF) else _no_image(encoded)
        raise DataError(
            "DATA_IMAGE", f"{name} cannot be decoded ({reason}): replace it, or leave it out"
        ) from error
