"""Finds losses that depend on the other samples of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter

import torch
from torch import Tensor, nn

from ..core.digest import flatten
from ..core.logger import logger
from ..core.rng import seed_generators
from ..core.types import Batch, Task, eval_step_of
from .unsaved_state import is_of_user

_MAX_SAMPLES = 6
_TOLERANCE = 1e-3  # of the largest loss


def warn_if_coupled(task: Task, model: nn.Module, batches: Iterable[Batch]) -> None:
    """Warn if the loss that a user's task returns for a sample depends on the others of its batch.

    **Host sync.**
    """
    if getattr(task, "couples_batch", False) or not is_of_user(type(task)):
        return
    with suppress(Exception):  # of a task that cannot be tried before training, or in float32
        if any(is_coupled(task, model, batch) for batch in batches):
            logger.warning(
                "[TASK] the loss that %s returns for a sample depends on the other samples of "
                "the batch, so it changes with the number of processes: compute each loss from "
                "its own sample, without a mean over the batch and without broadcasting [B, 1] "
                "with [B], or set couples_batch = True",
                type(task).__name__,
            )


def is_coupled(task: Task, model: nn.Module, batch: Batch) -> bool:
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
        return eval_step_of(task)(model, batch.map(itemgetter(places))).losses

    whole = losses([*range(size)])
    if not whole.ndim or whole.dtype != torch.float32:
        return False
    first, copied = losses([0, 0])
    tolerance = _TOLERANCE * whole.abs().max() + 1e-6
    # The first is false if the losses are random or NaN.
    return bool((first - copied).abs() <= tolerance < (whole[0] - first).abs())
