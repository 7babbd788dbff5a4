"""Optimizers that evaluate other weights than they train, such as schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.optim import Optimizer

from ..core.parameters import Optimizers, preserved_parameters


def has_evaluation_weights(optimizer: Optimizer) -> bool:
    """Whether `optimizer` has the methods `train()` and `eval()`, which replace the parameters."""
    return hasattr(optimizer, "train") and hasattr(optimizer, "eval")


@contextmanager
def evaluation_weights(optimizers: Optimizers) -> Iterator[None]:
    """Replace the parameters by the weights that their optimizers evaluate, for the block.

    Afterwards the parameters have the same bits as before. An optimizer's way back to them rounds:
    with it, training would depend on how often the model is evaluated.
    """
    with ExitStack() as way_back:
        for optimizer in filter(has_evaluation_weights, optimizers.values()):
            way_back.enter_context(preserved_parameters(optimizer))
            optimizer.eval()  # type: ignore[attr-defined]  # as has_evaluation_weights has found
            way_back.callback(optimizer.train)  # type: ignore[attr-defined]  # the same
        yield
