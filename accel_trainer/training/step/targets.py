"""Targets that no loss and no metric can use are refused, with the sample's id.

Legend: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core.errors import DataError
from ...core.extremes import extremes
from ...core.types import Batch


def rows_of(values: Tensor) -> Tensor:
    """Return values [B, ...] as [B, M]; B may be 0."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def trust(batch: Batch, fits: Tensor, fix: str) -> Tensor:
    """Return a factor for each sample [B]: 1, or NaN if a target of it does not fit.

    `fits` [B, ...] says which targets fit. On the CPU, where looking is no host sync, one that does
    not raises DataError instead; `fix` follows the fact, with the value at `{}`.
    """
    fits_all = rows_of(fits).all(1)
    if fits.is_cpu and not fits_all.all():
        place = fits_all.int().argmin()
        value = batch.targets[place][~fits[place]].reshape(-1)[0].item()
        raise DataError(
            "DATA_LABEL",
            f"sample {batch.sample_ids[place]} has the target {value}, {fix.format(value)}",
        )
    return fits_all / fits_all  # 0 / 0 is NaN: one kernel on a device, not three


def are_known_to_fit(targets: Tensor, fits: Callable[[Any], Any]) -> bool:
    """Return whether the host knows that each target fits, as all between two that fit do.

    Most do, and a factor for each sample takes as many kernels as the rest of a tiny model's step.
    """
    ends = extremes(targets)
    return ends is not None and all(map(fits, ends))


def trust_labels(batch: Batch, num_classes: int, ignored: int | None = None) -> Tensor:
    """Return the factors of `trust` for labels [B, ...], which are classes or `ignored`."""
    labels = batch.targets
    return trust(
        batch,
        (labels >= 0) & (labels < num_classes) | (labels == ignored),
        f"but the classes are 0 to {num_classes - 1}: correct it, leave the sample out, or, if it "
        "means that there is no label, set ClassificationTask(ignore_index={})",
    )
