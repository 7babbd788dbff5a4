from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from accel_trainer.core.errors import DataError
from accel_trainer.vision.data import photo_decode
from accel_trainer.vision.data.photo_decode import decode_photo, decoder_version, read_header

from .make_photos import decoded, encoded, photo
from .odd_pictures import bomb

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


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_jpeg_may_be_decoded_at_a_fraction_of_its_size(orientation: int) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PHOTO, exif=exif)
    header = read_header(data, "a")
    assert header.is_plain_jpeg
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


def test_what_is_half_transparent_lies_on_white() -> None:
    half = Image.new("LA", (4, 3), (0, 127))
    assert set(decode_photo(encoded(half, "png"), "a").ravel().tolist()) <= {127, 128}


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 7)])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_any_size_is_decoded(size: tuple[int, int], kind: str) -> None:
    assert decode_photo(encoded(photo(*size), kind), "a").shape == (size[1], size[0], 3)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    jpeg = bytearray(encoded(PHOTO))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 20_000, 20_000)
    for data in (bytes(jpeg), bomb(20_000), bomb(60_000)):
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
