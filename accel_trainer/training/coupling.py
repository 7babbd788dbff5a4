"""Finds losses that depend on the other samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from ..core.digest import flatten
from ..core.rng import seed_generators
from ..core.types import Batch, StepOutput

_MAX_SAMPLES = 8
_TOLERANCE = 1e-3  # of the largest loss


def is_coupled(step: Callable[[Batch], StepOutput], batch: Batch) -> bool:
    """Return whether the float32 losses of some samples are others in a quarter of a small batch.

    **Host sync.** False if that cannot be known: the loss is a mean, or random, or changes with
    each call, or the batch has something other than a row for each sample.
    """
    size = min(_MAX_SAMPLES, len(batch))
    rows = [each for each in flatten([batch.inputs, batch.targets]).values() if each is not None]
    if size < 2 or not all(isinstance(row, Tensor) and len(row) == len(batch) for row in rows):
        return False

    def losses(num: int, seed: int) -> Tensor:
        seed_generators(seed, batch.sample_ids.device)
        return step(batch.map(itemgetter(slice(num)))).losses

    num = max(1, size // 4)
    part, whole, again = losses(num, 0), losses(size, 1), losses(num, 2)
    if not part.ndim or part.dtype != torch.float32 or not torch.equal(part, again):
        return False
    difference = (whole[:num] - part).abs().max()
    return bool(difference > _TOLERANCE * whole.abs().max() + 1e-6)
