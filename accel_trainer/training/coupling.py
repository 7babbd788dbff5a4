"""Finds losses that depend on the other samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from ..core.digest import flatten
from ..core.rng import seed_generators
from ..core.types import Batch, StepOutput

_MAX_SAMPLES = 6
_TOLERANCE = 1e-3  # of the largest loss


def is_coupled(step: Callable[[Batch], StepOutput], batch: Batch) -> bool:
    """Return whether the float32 loss of a sample is different beside a copy of itself.

    **Host sync.** False if that cannot be known: the loss is a mean, or random, or the batch has
    something other than a row for each sample.
    """
    size = min(_MAX_SAMPLES, len(batch))
    rows = [each for each in flatten([batch.inputs, batch.targets]).values() if each is not None]
    if size < 2 or not all(isinstance(row, Tensor) and len(row) == len(batch) for row in rows):
        return False

    def losses(places: list[int]) -> Tensor:
        seed_generators(0, batch.sample_ids.device)
        return step(batch.map(itemgetter(places))).losses

    whole = losses([*range(size)])
    if not whole.ndim or whole.dtype != torch.float32:
        return False
    first, copied = losses([0, 0])
    tolerance = _TOLERANCE * whole.abs().max() + 1e-6
    is_random = not (first - copied).abs() <= tolerance  # or NaN
    return not is_random and bool((whole[0] - first).abs() > tolerance)
