"""Optimizers that evaluate other weights than they train, such as the schedule-free ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


def has_evaluation_weights(optimizer: Optimizer) -> bool:
    """Whether `optimizer` has the methods `train()` and `eval()`, which replace the parameters."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Let the parameters be what `optimizer` evaluates during the block.

    Afterwards they have the same bits as before.

    Its own way back rounds, and training would depend on how often it is evaluated.
    """
    if not has_evaluation_weights(optimizer):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]  # it has, see above
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]  # as above
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)
