"""Random numbers of samples, as pure functions of a key, the sample's id and the draw.

Integer arithmetic only, so that the bits are the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.rng import fold_in, mix

_MASK = 0xFFFFFFFF


def random_bits(key: int, sample_ids: Tensor, draw: int) -> Tensor:
    """Draw 32 random bits per sample: int64 [B] in [0, 2**32), on the device of `sample_ids`.

    `draw` numbers the draws for one sample (0 for the crop's row, 1 for its column, and so on).
    """
    return mix((mix((sample_ids & _MASK) ^ key) + fold_in(key, draw)) & _MASK)


def random_uniform(key: int, sample_ids: Tensor, draw: int) -> Tensor:
    """Draw float32 [B] in [0, 1) per sample: 24 random bits each, exactly representable."""
    return (random_bits(key, sample_ids, draw) >> 8).to(torch.float32) * 2.0**-24


def random_int(key: int, sample_ids: Tensor, draw: int, *, high: int) -> Tensor:
    """Draw int64 [B] in [0, high) per sample, by multiply-shift: its bias is below high / 2**32."""
    return (random_bits(key, sample_ids, draw) * high) >> 32
