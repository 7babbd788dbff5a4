"""Pictures in every odd form that files have, with the pixels that each of them means."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageCms

from .make_photos import encoded

HEIGHT, WIDTH = 10, 14
_ORIENTATION = 0x0112
# EXIF's orientation, and how the upright picture is turned or mirrored before it is stored.
_STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


class OddPicture(NamedTuple):
    """An encoded picture of HEIGHT x WIDTH pixels.

    `pixels` uint8 [H, W, 3] are what it means; None: nobody can know, so it must be refused.
    """

    name: str
    data: bytes
    pixels: NDArray[np.uint8] | None
    is_grey: bool = False


def grey16() -> NDArray[np.uint16]:
    """All shades from black to white, [H, W]; no two pixels are equal."""
    ramp = np.linspace(0, 65535, HEIGHT * WIDTH).round().astype(np.uint16)
    return ramp.reshape(HEIGHT, WIDTH)


def colour16() -> NDArray[np.uint16]:
    """[H, W, 3]"""
    grey = grey16()
    return np.stack([grey, grey[::-1], grey[:, ::-1]], axis=-1)


def in_colour(grey: NDArray[Any]) -> NDArray[np.uint8]:
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=-1)


def odd_pictures() -> Iterator[OddPicture]:
    """Yield them; the first is a plain one in colour."""
    yield OddPicture("plain.png", encoded(_rgb(), "png"), _upper(colour16()))
    yield from _turned()
    yield from _see_through()
    yield from _colour_spaces()
    yield from _deep()
    yield from _bands()
    yield from _unknown()
    yield from _several()


def _rgb() -> Image.Image:
    return Image.fromarray(_upper(colour16()))


def _upper(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    return (pixels >> 8).astype(np.uint8)


def _as_pillow_reads(data: bytes) -> NDArray[np.uint8]:
    """For lossy formats, whose pixels no test can know."""
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def _turned() -> Iterator[OddPicture]:
    for kind, orientation in product(("jpeg", "png", "webp", "tiff"), range(1, 9)):
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        image = _rgb()
        if orientation > 1:
            image = image.transpose(_STORED_AS[orientation])
        options: dict[str, Any] = {"webp": {"lossless": True}}.get(kind, {})
        data = encoded(image, kind, exif=exif, **options)
        expected = _upper(colour16())
        if kind == "jpeg":
            stored = Image.fromarray(_as_pillow_reads(data))
            back = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
            expected = np.array(stored.transpose(_STORED_AS[back]) if back > 1 else stored)
            filled = data[:2] + b"\xff\xff\xff" + data[2:]
            yield OddPicture(f"turned {orientation} after a fill byte.jpg", filled, expected)
            after = data[:2] + app1(b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>") + data[2:]
            yield OddPicture(f"turned {orientation} after XMP.jpg", after, expected)
            xmp = f'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="{orientation}"/>'.encode()
            plain = encoded(image)
            data_of_xmp = plain[:2] + app1(xmp) + plain[2:]
            yield OddPicture(f"turned {orientation} by XMP.jpg", data_of_xmp, expected)
            both = data[:2] + app1(xmp.replace(b'="', b'="9')) + data[2:]
            yield OddPicture(f"turned {orientation}, and not by XMP.jpg", both, expected)
        yield OddPicture(f"turned {orientation}.{kind}", data, expected)


def app1(content: bytes) -> bytes:
    """A segment of a JPEG."""
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def png(
    pixels: bytes | NDArray[Any], *chunks: bytes, bits: int, colour: int, width: int = WIDTH
) -> bytes:
    """A PNG whose rows are `pixels`, packed and in big-endian order."""
    rows = pixels if isinstance(pixels, bytes) else pixels.astype(pixels.dtype.newbyteorder(">"))
    flat = rows if isinstance(rows, bytes) else rows.tobytes()
    row_bytes = len(flat) // HEIGHT
    filtered = b"".join(
        b"\0" + flat[start : start + row_bytes] for start in range(0, len(flat), row_bytes)
    )
    header = struct.pack(">IIBBBBB", width, HEIGHT, bits, colour, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        *chunks,
        chunk(b"IDAT", zlib.compress(filtered)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims to be `side` x `side` pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _see_through() -> Iterator[OddPicture]:
    """What is transparent is white, whatever colour hides there."""
    colour, grey = _upper(colour16()), _upper(grey16())
    is_clear = np.zeros((HEIGHT, WIDTH), bool)
    is_clear[2:5, 3:9] = True
    alpha = np.where(is_clear, 0, 255).astype(np.uint8)
    white = np.where(is_clear[..., None], 255, colour).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([colour, alpha]))
    yield OddPicture("alpha.png", encoded(rgba, "png"), white)
    yield OddPicture("alpha.tiff", encoded(rgba, "tiff"), white)
    yield OddPicture("alpha.webp", encoded(rgba, "webp", lossless=True, exact=True), white)
    la = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    grey_on_white = in_colour(np.where(is_clear, 255, grey))
    yield OddPicture("grey alpha.png", encoded(la, "png"), grey_on_white)
    yield OddPicture("grey alpha.tiff", encoded(la, "tiff"), grey_on_white)
    deep = np.dstack([colour16(), np.where(is_clear, 0, 65535).astype(np.uint16)])
    yield OddPicture("alpha of 16 bits.png", png(deep, bits=16, colour=6), white)
    deep = np.dstack([grey16(), np.where(is_clear, 0, 65535).astype(np.uint16)])
    yield OddPicture("grey alpha of 16 bits.png", png(deep, bits=16, colour=4), grey_on_white)

    numbers = (np.arange(HEIGHT * WIDTH) % 4).astype(np.uint8).reshape(HEIGHT, WIDTH)
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [90, 90, 90]], np.uint8)
    palette = Image.fromarray(numbers, "P")
    palette.putpalette(colours.ravel().tolist())
    without_1 = colours.copy()
    without_1[1] = 255
    yield OddPicture("palette.png", encoded(palette, "png"), colours[numbers])
    for kind in ("png", "gif"):
        data = encoded(palette, kind, transparency=1)
        yield OddPicture(f"palette with a clear index.{kind}", data, without_1[numbers])
    data = encoded(palette, "png", transparency=bytes([255, 0, 255]))
    yield OddPicture("palette with alpha.png", data, without_1[numbers])

    for bits in (1, 2, 4, 8, 16):
        values = (grey16() >> (16 - bits)).astype(np.uint16 if bits == 16 else np.uint8)
        key = int(values[3, 4])
        shades = values >> 8 if bits == 16 else values * (255 // (2**bits - 1))
        expected = in_colour(np.where(values == key, 255, shades))
        data = png(
            packed(values, bits), chunk(b"tRNS", struct.pack(">H", key)), bits=bits, colour=0
        )
        yield OddPicture(f"grey of {bits} bits with a clear shade.png", data, expected, True)
    for bits in (8, 16):
        stored = colour16() if bits == 16 else colour
        key3 = stored[3, 4]
        expected = np.where((stored == key3).all(2)[..., None], 255, colour).astype(np.uint8)
        data = png(stored, chunk(b"tRNS", struct.pack(">HHH", *key3.tolist())), bits=bits, colour=2)
        yield OddPicture(f"{bits} bits with a clear colour.png", data, expected)
    near = colour16() // 256 * 256 + np.uint16(3)  # the upper bytes are those of the clear colour
    key3 = near[3, 4] + np.uint16(1)
    data = png(near, chunk(b"tRNS", struct.pack(">HHH", *key3.tolist())), bits=16, colour=2)
    yield OddPicture("16 bits, nearly a clear colour.png", data, _upper(near))


def packed(values: NDArray[Any], bits: int) -> bytes:
    """Rows of values of `bits` bits each, padded to whole bytes."""
    rows = []
    for row in values.tolist():
        text = "".join(format(value, f"0{bits}b") for value in row)
        text += "0" * (-len(text) % 8)
        rows.append(int(text, 2).to_bytes(len(text) // 8, "big"))
    return b"".join(rows)


def _colour_spaces() -> Iterator[OddPicture]:
    grey = _upper(grey16())
    for kind in ("png", "bmp", "tiff", "ppm"):
        data = encoded(Image.fromarray(grey), kind)
        yield OddPicture(f"grey.{kind}", data, in_colour(grey), True)
    one_bit = Image.fromarray(grey > 99)
    for kind in ("png", "tiff", "bmp", "ppm"):
        data = encoded(one_bit, kind)
        yield OddPicture(f"one bit.{kind}", data, in_colour((grey > 99) * 255), True)
    cmyk, lab = _rgb().convert("CMYK"), Image.new("LAB", (WIDTH, HEIGHT), (140, 20, 30))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pictures = {
        "cmyk.tiff": encoded(cmyk, "tiff"),
        "cmyk, inverted as Adobe does.jpg": encoded(cmyk),
        "ycbcr.tiff": encoded(_rgb().convert("YCbCr"), "tiff"),
        "lab.tiff": encoded(lab, "tiff"),
        "hsv saved as jpeg.jpg": encoded(_rgb().convert("HSV").convert("RGB"), quality=90),
        "rgb.jpg": encoded(_rgb(), keep_rgb=True),
        "progressive.jpg": encoded(_rgb(), progressive=True),
        "grey.jpg": encoded(Image.fromarray(grey)),
        "profile.jpg": encoded(_rgb(), icc_profile=profile),
        "profile.png": encoded(_rgb(), "png", icc_profile=profile),
        "lossy.webp": encoded(_rgb(), "webp"),
        "unused channel.tiff": encoded(_rgb().convert("RGBX"), "tiff"),
        "palette and alpha.tiff": encoded(_rgb().convert("P").convert("PA"), "tiff"),
        "colours.gif": encoded(_rgb(), "gif"),
    }
    if int(PIL.__version__.partition(".")[0]) < 13:
        del pictures["ycbcr.tiff"]  # Pillow 12 cannot read what it has written
    for name, data in pictures.items():
        yield OddPicture(name, data, _as_pillow_reads(data), name == "grey.jpg")


def tiff(
    values: NDArray[Any], *, bits: int, sample_format: int = 1, order: str = "<", black: int = 1
) -> bytes:
    """A grey TIFF that Pillow would not write; `black` is 0 if zero means white."""
    pixels = (
        packed(values, bits)
        if bits in (10, 12, 14)
        else values.astype(values.dtype.newbyteorder(order)).tobytes()
    )
    shorts = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 1, 262: black, 277: 1, 278: HEIGHT}
    tags = {number: (3, value) for number, value in (shorts | {339: sample_format}).items()}
    tags |= {273: (4, 8), 279: (4, len(pixels))}
    entries = [
        struct.pack(f"{order}HHI", number, kind, 1)
        + struct.pack(f"{order}HH" if kind == 3 else f"{order}I", *([value, 0][: 5 - kind]))
        for number, (kind, value) in sorted(tags.items())
    ]
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(pixels))
    directory = struct.pack(f"{order}H", len(entries)) + b"".join(entries)
    return start + pixels + directory + struct.pack(f"{order}I", 0)


def _deep() -> Iterator[OddPicture]:
    """More than 8 bits: the upper 8 of the format's range are kept."""
    grey, colour = grey16(), colour16()
    expected = in_colour(grey >> 8)
    yield OddPicture("16 bits.png", png(grey, bits=16, colour=0), expected, True)
    yield OddPicture("colours of 16 bits.png", png(colour, bits=16, colour=2), _upper(colour))
    for order in "<>":
        data = tiff(grey, bits=16, order=order)
        yield OddPicture(f"16 bits {order}.tiff", data, expected, True)
        data = tiff(grey.astype(np.int32), bits=32, sample_format=2, order=order)
        yield OddPicture(f"16 bits in 32 {order}.tiff", data, expected, True)
    data = tiff(grey, bits=16, black=0)
    yield OddPicture("16 bits, white is zero.tiff", data, 255 - expected, True)
    data = tiff(grey >> 8, bits=12)
    yield OddPicture("8 bits in the 12 of a format.tiff", data, in_colour(grey >> 12), True)
    data = tiff(grey >> 4, bits=12)
    yield OddPicture("12 bits.tiff", data, expected, True)
    for bits in (8, 10, 12, 14, 16):
        most = 2**bits - 1
        values = np.rint(grey / 65535 * most).astype(np.uint8 if bits == 8 else ">u2")
        start = f"P5 {WIDTH} {HEIGHT} {most}\n".encode()
        shades = np.rint(values.astype(float) / most * 65535).astype(np.uint16) >> 8
        shades = values if bits == 8 else shades
        yield OddPicture(f"{bits} bits.pgm", start + values.tobytes(), in_colour(shades), True)
    start = f"P6 {WIDTH} {HEIGHT} 65535\n".encode()
    data = start + colour.astype(">u2").tobytes()
    yield OddPicture("colours of 16 bits.ppm", data, _as_pillow_reads(data))


def band_tiff(
    bands: NDArray[Any],
    *,
    extra: tuple[int, ...] = (),
    in_planes: bool = False,
    deflated: bool = False,
) -> bytes:
    """A TIFF of RGB and other bands [H, W, C]; `extra` is its tag of what the others are."""
    bits, count = 8 * bands.dtype.itemsize, bands.shape[-1]
    parts = (
        [band.tobytes() for band in np.moveaxis(bands, -1, 0)] if in_planes else [bands.tobytes()]
    )
    parts = [zlib.compress(part) if deflated else part for part in parts]
    places = np.cumsum([8, *map(len, parts)]).tolist()
    tags = {256: [WIDTH], 257: [HEIGHT], 258: [bits] * count, 259: [8 if deflated else 1]}
    tags |= {262: [2], 273: places[:-1], 277: [count], 278: [HEIGHT], 279: list(map(len, parts))}
    tags |= {284: [2 if in_planes else 1]} | ({338: [*extra]} if extra else {})
    end = places[-1] + 6 + 12 * len(tags)
    entries, values = b"", b""
    for number, found in tags.items():
        stored = struct.pack(f"<{len(found)}I", *found)
        place = end + len(values) if len(found) > 1 else found[0]
        entries += struct.pack("<HHII", number, 4, len(found), place)
        values += stored if len(found) > 1 else b""
    start = b"II*\0" + struct.pack("<I", places[-1]) + b"".join(parts)
    return start + struct.pack("<H", len(tags)) + entries + bytes(4) + values


def _bands() -> Iterator[OddPicture]:
    """A fourth band is transparency only where the file says so; else it is other light."""
    deep = np.concatenate([colour16(), grey16()[::-1, ::-1, None], colour16()], axis=-1)
    shown = _upper(colour16())
    alpha = _upper(deep[..., 3:4]) / 255
    on_white = np.rint(shown * alpha + 255 * (1 - alpha)).astype(np.uint8)
    # Pillow misreads some planes.
    misread = {(True, False, 3, 16), (True, False, 4, 16), (True, True, 4, 8), (True, True, 4, 16)}
    for case in product((False, True), (False, True), (3, 4), (8, 16)):
        in_planes, deflated, count, bits = case
        bands = deep[..., :count] if bits == 16 else _upper(deep[..., :count])
        data = band_tiff(bands, in_planes=in_planes, deflated=deflated)
        yield OddPicture(f"bands {case}.tiff", data, None if case in misread else shown)
    for count, deflated in product((4, 5), (False, True)):
        bands = _upper(deep[..., :count])
        data = band_tiff(bands, extra=(0,) * (count - 3), deflated=deflated)
        yield OddPicture(f"{count} bands that say nothing, {deflated}.tiff", data, shown)
    for in_planes, deflated in product((False, True), (False, True)):
        data = band_tiff(_upper(deep[..., :4]), extra=(2,), in_planes=in_planes, deflated=deflated)
        yield OddPicture(f"alpha band {in_planes, deflated}.tiff", data, on_white)


def _unknown() -> Iterator[OddPicture]:
    """Formats that do not say what is black and what is white, and those that are not read."""
    share = grey16() / 65535
    stored: dict[str, tuple[NDArray[Any], int]] = {
        "8 bits in 32": ((share * 255).astype(np.int32), 2),
        "12 bits in 32": ((share * 4095).astype(np.int32), 2),
        "8 bits in unsigned 32": ((share * 255).astype(np.uint32), 1),
        "all of 32 bits": ((share * (2**31 - 1)).astype(np.int32), 2),
        "negative values in 32": ((share * 60_000 - 30_000).astype(np.int32), 2),
        "negative values in 16": ((share * 3_000 - 1_000).astype(np.int16), 2),
        "negative values in 8": ((share * 200 - 100).astype(np.int8), 2),
        "0 to 1 in floats": (share.astype(np.float32), 3),
        "0 to 255 in floats": ((share * 255).astype(np.float32), 3),
        "double floats": (share.astype(np.float64), 3),
        "half floats": (share.astype(np.float16), 3),
    }
    for (name, (values, sample_format)), order in product(stored.items(), "<>"):
        data = tiff(
            values, bits=8 * values.dtype.itemsize, sample_format=sample_format, order=order
        )
        yield OddPicture(f"{name} {order}.tiff", data, None)
    for bits in (10, 14):
        yield OddPicture(f"{bits} bits.tiff", tiff(grey16() >> (16 - bits), bits=bits), None)
    floats = share.astype("<f4").tobytes()
    yield OddPicture("floats.ppm", f"Pf\n{WIDTH} {HEIGHT}\n-1.0\n".encode() + floats, None)
    yield OddPicture("half a file.png", encoded(_rgb(), "png")[:70], None)
    yield OddPicture("a page of text.jpg", b"<html>404</html>", None)


def _several() -> Iterator[OddPicture]:
    """The first frame or page counts."""
    others = [Image.new("RGB", (WIDTH, HEIGHT), shade) for shade in ("red", "blue")]
    first = _upper(colour16())
    for kind in ("png", "tiff", "webp", "gif"):
        options: dict[str, Any] = {"webp": {"lossless": True}}.get(kind, {})
        data = encoded(_rgb(), kind, save_all=True, append_images=others, **options)
        expected = _as_pillow_reads(data) if kind == "gif" else first
        yield OddPicture(f"three.{kind}", data, expected)
