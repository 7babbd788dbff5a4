"""Says whether the colour profile of a photo gives its pixels other colours than sRGB.

Profiles are not applied: a model sees the numbers that a file stores.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np

_MAX_SHIFT = 4  # levels of 255, on average: less is seen by nobody, and due to rounding
_LEVELS = (0, 64, 128, 192, 255)


def has_other_colours(image: Any) -> bool:
    """Return whether an open image of Pillow has a profile whose colours differ from sRGB."""
    profile = image.info.get("icc_profile")
    return bool(profile) and _shift(profile, image.mode) > _MAX_SHIFT


@lru_cache(maxsize=64)
def _shift(profile: bytes, mode: str) -> float:
    """Return by how many levels of 255 a profile changes colours on average."""
    from PIL import Image, ImageCms

    grid = np.stack(np.meshgrid(_LEVELS, _LEVELS, _LEVELS), -1).reshape(1, -1, 3).astype(np.uint8)
    colours = Image.fromarray(grid).convert("L" if mode.startswith(("L", "I", "1")) else "RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        shown = ImageCms.profileToProfile(
            colours, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return 0.0  # damaged, or for other colours, such as CMYK, which no program would apply
    return float(np.abs(np.asarray(shown, int) - np.asarray(colours.convert("RGB"), int)).mean())
