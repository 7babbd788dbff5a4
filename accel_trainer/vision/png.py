"""Pictures as PNG, the same bytes each time.

Shapes: H height, W width.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor

from ..core.errors import ConfigError


def to_png(picture: Tensor) -> bytes:
    """Return a picture as the bytes of a PNG in colour, for `trainer.log_picture`. **Host sync.**

    `picture` is [3, H, W], or grey [1, H, W] or [H, W], on any device: uint8, or floats that are
    clamped to 0 to 1, NaN as 0.

    Raises:
        ConfigError: another type or shape, or the package pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        fact = "pictures need pillow, which is missing"
        raise ConfigError("PICTURE", f"{fact}: pip install 'accel-trainer[vision]'") from None
    is_known = picture.dtype == torch.uint8 or picture.is_floating_point()
    has_shape = picture.ndim in (2, 3) and picture.shape[:-2] in ((), (1,), (3,))
    if not is_known or not has_shape or not picture.numel():
        found = f"{picture.dtype} {list(picture.shape)}"
        fix = "give uint8, or floats from 0 to 1, of [3, H, W], [1, H, W] or [H, W]"
        raise ConfigError("PICTURE", f"{found} is not a picture: {fix}")
    if picture.is_floating_point():
        scaled = picture.detach().nan_to_num(0.0).clamp(0, 1).float() * 255
        picture = scaled.round().to(torch.uint8)
    pixels = picture.expand(3, *picture.shape[-2:]).permute(1, 2, 0).cpu()
    data = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(data, "png")
    return data.getvalue()
