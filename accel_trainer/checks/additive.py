"""Tries whether the sums of a user's metric add up, as they must over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import Batch, Metric, StepOutput
from ..training.evaluation.evaluator import without_ignored
from .unsaved_state import is_of_user

_TOLERANCE = 1e-3  # of the sums; what floats round is far below


def check_additive(metric: Metric, batches: Sequence[Batch], output: StepOutput | None) -> None:
    """Raise ConfigError unless the sums of halves of the last batch add up to those of the whole.

    **Host sync.** Nothing is known of a metric that draws random numbers, and of an output that has
    something other than a row for each sample.
    """
    if output is None or not is_of_user(type(metric)):
        return
    batch, output = without_ignored(batches[-1], output)
    if len(batch) < 2:
        return
    middle = len(batch) // 2
    try:
        parts = [_rows(batch, output, rows) for rows in (slice(0, middle), slice(middle, None))]
        whole, again = (_sums_of(metric, batch, output) for _ in range(2))
        first, second = (_sums_of(metric, *part) for part in parts)
    except Exception:  # the user's metric may need what few samples do not have
        return
    tolerance = _TOLERANCE * (first.abs() + second.abs() + whole.abs())
    if whole.equal(again) and ((first + second - whole).abs() > tolerance).any():
        raise ConfigError(
            "METRIC",
            f"the sums of metric {type(metric).__name__} for the two halves of a batch do not add "
            "up to those for the whole, so its numbers would depend on the batches: add to sums "
            "over samples, and divide in compute; a maximum needs WholeSetMetric",
        )


def _rows(batch: Batch, output: StepOutput, rows: slice) -> tuple[Batch, StepOutput]:
    """Return some rows of both. Raises ValueError if a tensor has no row for each sample."""

    def take(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] != (len(batch),):
            raise ValueError
        return tensor[rows]

    return batch.map(take), recursively_apply(take, output)


def _sums_of(metric: Metric, batch: Batch, output: StepOutput) -> Tensor:
    sums = metric.empty(batch.sample_ids.device)
    metric.update(sums, batch, output)
    return torch.nan_to_num(sums)
