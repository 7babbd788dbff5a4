"""Optimizers that evaluate other weights than they train, such as schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ..core.parameters import preserved_parameters


def has_evaluation_weights(optimizer: Optimizer) -> bool:
    """Whether `optimizer` has the methods `train()` and `eval()`, which replace the parameters."""
    return hasattr(optimizer, "train") and hasattr(optimizer, "eval")


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Replace the parameters by the weights that `optimizer` evaluates, for the block.

    Afterwards the parameters have the same bits as before. The optimizer's way back to them rounds:
    with it, training would depend on how often the model is evaluated.
    """
    if not has_evaluation_weights(optimizer):
        yield
        return
    with preserved_parameters(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]  # as has_evaluation_weights has found
        try:
            yield
        finally:
            optimizer.train()  # type: ignore[attr-defined]  # the same
