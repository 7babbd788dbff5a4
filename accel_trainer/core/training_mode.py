"""Evaluation mode, as torch's `eval` sets it, for modules that compute with their mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from .parameters import preserved_weights


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode for the block, always by way of training mode.

    What a module computes once from its weights when it is evaluated, such as a kernel or weights
    with an adapter added in, thus follows from the weights as they are now. Afterwards, the modules
    have their modes again, and also the same bits if one of them has a `train` of its own.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        # The gradients, which were as large, are gone by now.
        with preserved_weights(model) if switching(model) else nullcontext():
            model.eval()
            try:
                yield
            finally:
                model.train()
    finally:
        for module, is_training in modes:
            if module.training != is_training:
                module.train(is_training)
            # The next forward would not see what changes the shards of weights that FSDP leaves
            # whole: the average, or an optimizer that goes back from the weights it evaluates.
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]  # of FSDPModule


def switching(model: nn.Module) -> list[nn.Module]:
    """Return the modules in `model` that may change more than their mode with it."""
    return [each for each in model.modules() if type(each).train is not nn.Module.train]
