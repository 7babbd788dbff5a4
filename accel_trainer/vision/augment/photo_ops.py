"""Changes colours and geometry with Pillow: colour jitter, RandAugment and TrivialAugment.

Shapes: H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

from ..data.photo_decode import Pixels

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
"""The operations, as in torchvision's `RandAugment`."""

MAX_MAGNITUDE = 30

_JITTER_ORDERS = tuple(permutations(range(4)))
_MAX_SHEAR = 0.3
_MAX_DEGREES = 30.0
_MAX_ENHANCE = 0.9
_MAX_TRANSLATE = 150 / 331  # fraction of the width or height
_MAX_BITS_LOST = 4


def jitter_colors(pixels: Pixels, most: Sequence[float], uniform: Sequence[float]) -> Pixels:
    """Change brightness, contrast, saturation and hue of uint8 [H, W, 3], in random order.

    `most` are the four largest changes. `uniform` are five numbers in 0..1: for the order of the
    changes, and for the amount of each.
    """
    from PIL import Image, ImageEnhance

    image = Image.fromarray(np.ascontiguousarray(pixels))
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for which in _JITTER_ORDERS[int(uniform[0] * len(_JITTER_ORDERS))]:
        change = most[which] * (2 * uniform[1 + which] - 1)
        if most[which] and which < 3:
            image = enhancers[which](image).enhance(max(0.0, 1 + change))
        elif most[which]:
            image = _turned_hue(image, change)
    return np.array(image)


def _turned_hue(image: Any, change: float) -> Any:
    """Turn the hue by `change` (-0.5..0.5) of the colour wheel."""
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    turned = (np.array(hue).astype(np.int64) + round(change * 255)) % 256
    turned_image = Image.fromarray(turned.astype(np.uint8))
    return Image.merge("HSV", (turned_image, saturation, value)).convert("RGB")


def operate(
    pixels: Pixels,
    operation: str,
    *,
    strength: float,
    is_negative: bool,
    fill: tuple[int, ...],
) -> Pixels:
    """Apply one of `OPERATIONS` to uint8 [H, W, 3].

    `strength` is 0..1. `is_negative` reverses an operation that has a direction. `fill` is the
    colour of pixels that come from outside the image.
    """
    from PIL import Image

    if operation == "identity":
        return pixels
    image = Image.fromarray(np.ascontiguousarray(pixels))
    signed = -strength if is_negative else strength
    if operation in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
        return np.array(_moved(image, operation, signed, fill))
    return np.array(_recolored(image, operation, strength, signed))


def _moved(image: Any, operation: str, signed: float, fill: tuple[int, ...]) -> Any:
    from PIL import Image

    if operation == "rotate":
        return image.rotate(signed * _MAX_DEGREES, fillcolor=fill)
    shear_x = signed * _MAX_SHEAR if operation == "shear_x" else 0.0
    shear_y = signed * _MAX_SHEAR if operation == "shear_y" else 0.0
    move_x = signed * _MAX_TRANSLATE * image.width if operation == "translate_x" else 0.0
    move_y = signed * _MAX_TRANSLATE * image.height if operation == "translate_y" else 0.0
    matrix = (1, shear_x, int(move_x), shear_y, 1, int(move_y))
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


def _recolored(image: Any, operation: str, strength: float, signed: float) -> Any:
    from PIL import ImageEnhance, ImageOps

    if operation == "posterize":
        return ImageOps.posterize(image, 8 - round(strength * _MAX_BITS_LOST))
    if operation == "solarize":
        return ImageOps.solarize(image, threshold=round(256 * (1 - strength)))
    if operation == "autocontrast":
        return ImageOps.autocontrast(image)
    if operation == "equalize":
        return ImageOps.equalize(image)
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "color": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "sharpness": ImageEnhance.Sharpness,
    }
    return enhancers[operation](image).enhance(1 + signed * _MAX_ENHANCE)
