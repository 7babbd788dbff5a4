from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from accel_trainer.core.errors import DataError
from accel_trainer.vision.data import photo_decode
from accel_trainer.vision.data.photo_decode import decode_photo, decoder_version, read_header

from .make_photos import decoded, encoded, photo

PHOTO = photo(50, 37)


@pytest.mark.parametrize(
    "options", [{}, {"quality": 95, "subsampling": 0}, {"progressive": True}, {"keep_rgb": True}]
)
def test_a_jpeg_has_the_pixels_that_pillow_decodes(options: dict[str, object]) -> None:
    data = encoded(PHOTO, **options)
    pixels = decode_photo(data, "a")
    assert np.array_equal(pixels, decoded(data))
    assert pixels.flags.writeable
    assert pixels.flags.c_contiguous
    assert (read_header(data, "a").height, read_header(data, "a").width) == (37, 50)


@pytest.mark.parametrize("mode", ["L", "CMYK", "1", "P", "LA", "RGBA", "YCbCr", "I;16"])
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "webp", "gif", "bmp"])
def test_every_mode_and_format_becomes_rgb(mode: str, kind: str) -> None:
    image = PHOTO.convert("L").convert("I;16") if mode == "I;16" else PHOTO.convert(mode)
    try:
        data = encoded(image, kind)
        Image.open(io.BytesIO(data)).load()
    except (OSError, ValueError):
        pytest.skip(f"Pillow writes no {kind} of mode {mode} that it can read")
    pixels = decode_photo(data, "a")
    assert pixels.shape == (37, 50, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_a_photo_is_turned_upright(kind: str, orientation: int) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PHOTO, kind, exif=exif)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(decode_photo(data, "a"), expected)
    header = read_header(data, "a")
    assert (header.height, header.width) == expected.shape[:2]
    assert header.is_plain_jpeg == (kind == "jpeg")
    if kind == "jpeg":
        assert decode_photo(data, "a", shrink=2).shape == (
            -(-header.height // 2),
            -(-header.width // 2),
            3,
        )


def test_damaged_exif_data_is_ignored() -> None:
    pytest.importorskip("simplejpeg")
    for exif in (
        b"Exif\0\0",
        b"Exif\0\0MM\0*\0\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0" + bytes(30),
    ):
        data = encoded(PHOTO, exif=exif)
        assert decode_photo(data, "a").shape == (37, 50, 3)
    turned = Image.Exif()
    turned[0x0112] = 77
    assert decode_photo(encoded(PHOTO, exif=turned), "a").shape == (37, 50, 3)


def test_16_bits_keep_their_upper_8() -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for kind in ("png", "tiff"):
        pixels = decode_photo(encoded(Image.fromarray(grey), kind), "a")
        assert np.array_equal(
            pixels, np.repeat((grey >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        )
    wide = Image.fromarray(grey.astype(np.int32))
    assert np.array_equal(decode_photo(encoded(wide, "tiff"), "a")[..., 0], grey >> 8)


def test_what_is_transparent_becomes_white() -> None:
    clear = Image.new("RGBA", (4, 3), (10, 20, 30, 0))
    assert (decode_photo(encoded(clear, "png"), "a") == 255).all()
    half = Image.new("LA", (4, 3), (0, 127))
    assert set(decode_photo(encoded(half, "png"), "a").ravel().tolist()) <= {127, 128}
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert (decode_photo(encoded(palette, "png", transparency=1), "a") == 255).all()
    assert (decode_photo(encoded(palette, "png"), "a") == 9).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 7)])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_any_size_is_decoded(size: tuple[int, int], kind: str) -> None:
    assert decode_photo(encoded(photo(*size), kind), "a").shape == (size[1], size[0], 3)


def png_that_claims(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
    )
    return start + encoded(PHOTO, "png")[len(start) :]


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    jpeg = bytearray(encoded(PHOTO))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 20_000, 20_000)
    for data in (bytes(jpeg), png_that_claims(20_000, 20_000), png_that_claims(60_000, 60_000)):
        for read in (read_header, decode_photo):
            with pytest.raises(DataError, match=r"error\[DATA_IMAGE_LARGE\]: here") as error:
                read(data, "here")
            assert "\n" not in str(error.value)


BROKEN = {
    "empty": b"",
    "text": b"<html>404</html>",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "half a jpeg": encoded(PHOTO)[:600],
    "the start of a jpeg": encoded(PHOTO)[:20],
    "half a png": encoded(PHOTO, "png")[:900],
    "only a header": encoded(PHOTO, "png")[:33],
    "two bytes": b"\xff\xd8",
    "floating point": encoded(Image.fromarray(np.zeros((3, 3), np.float32)), "tiff"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_photo_is_named(kind: str) -> None:
    with pytest.raises(DataError, match=r"error\[DATA_IMAGE\]: row 7 of x cannot be") as error:
        decode_photo(BROKEN[kind], "row 7 of x")
    assert "\n" not in str(error.value)


def test_bytes_after_the_end_do_not_matter() -> None:
    data = encoded(PHOTO)
    assert np.array_equal(decode_photo(data + b"more", "a"), decode_photo(data, "a"))


def test_without_simplejpeg_pillow_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(PHOTO)
    expected = decode_photo(data, "a")
    assert "simplejpeg" in decoder_version()
    monkeypatch.setattr(photo_decode, "_simplejpeg", lambda: None)
    assert np.array_equal(decode_photo(data, "a"), expected)
    assert "simplejpeg" not in decoder_version()
    assert "pillow" in decoder_version()
