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
    """Raise ConfigError unless the halves of the last batch add to its sums what the whole did.

    **Host sync.** Nothing is known of a metric that draws random numbers, and of an output that has
    something other than a row for each sample.
    """
    if output is None or not is_of_user(type(metric)):
        return
    batch, output = without_ignored(batches[-1], output)
    try:
        halves = [_half(batch, output, each) for each in range(len(batch) < 2, 2)]
        added, again = (_added_by([(batch, output), *halves], metric) for _ in range(2))
    except Exception:  # the user's metric may need what few samples do not have
        return
    missing = (added[0] - added[1:].sum(0)).abs()
    if added.equal(again) and (missing > _TOLERANCE * added.abs().sum(0)).any():
        raise ConfigError(
            "METRIC",
            f"the sums of metric {type(metric).__name__} for two parts of a batch do not add up "
            "to those for both, so its numbers would depend on the batches: add to sums over "
            "samples, and divide in compute; a maximum needs WholeSetMetric",
        )


def _half(batch: Batch, output: StepOutput, number: int) -> tuple[Batch, StepOutput]:
    """Return half the rows. Raises RuntimeError if a tensor has no row for each sample."""
    middle = len(batch) // 2

    def take(tensor: Tensor) -> Tensor:
        return torch.split(tensor, [middle, len(batch) - middle])[number]

    return batch.map(take), recursively_apply(take, output)


def _added_by(parts: Sequence[tuple[Batch, StepOutput]], metric: Metric) -> Tensor:
    """Return what each part in turn adds to the sums, [P, K]."""
    sums = metric.empty(parts[0][0].sample_ids.device)
    found = [sums.clone()]
    for part in parts:
        metric.update(sums, *part)
        found.append(torch.nan_to_num(sums, posinf=0, neginf=0))
    return torch.stack(found).diff(dim=0)
