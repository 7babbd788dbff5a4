"""Makes a photo smaller before it is packed.

Shapes: H height, W width.
"""

from __future__ import annotations

from io import BytesIO

import torch
import torch.nn.functional as F

from ...vision.data.eval_transform import Box, shrink_for
from ...vision.data.photo_decode import Pixels, decode_photo, read_header


def reencode(data: bytes, name: str, *, short_side: int, quality: int) -> bytes:
    """Return a photo as a JPEG whose shorter side has `short_side` pixels.

    A photo that is not larger keeps its bytes. Raises DataError with `name` if the photo cannot be
    decoded.
    """
    header = read_header(data, name)
    shorter = min(header.height, header.width)
    if shorter <= short_side:
        # A broken photo is found now, not in the middle of a run.
        decode_photo(data, name, header=header)
        return data
    # Twice the size that is kept: the resize sees the detail that it averages.
    shrink = shrink_for(Box(0, 0, header.height, header.width), 2 * short_side)
    pixels = decode_photo(data, name, header=header, shrink=shrink)
    sides = (header.height, header.width)
    size = tuple(max(1, round(side * short_side / shorter)) for side in sides)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    resized = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    return _encode(resized[0].permute(1, 2, 0).contiguous().numpy(), quality)


def _encode(pixels: Pixels, quality: int) -> bytes:
    try:
        import simplejpeg
    except ImportError:
        from PIL import Image

        file = BytesIO()
        Image.fromarray(pixels).save(file, "jpeg", quality=quality, subsampling="4:2:0")
        return file.getvalue()
    return bytes(
        simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    )
