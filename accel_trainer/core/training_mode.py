"""Training mode, in which the norms of a frozen part keep their statistics."""

from __future__ import annotations

from torch import nn


def set_training_mode(model: nn.Module) -> None:
    """Put `model` into training mode, except for norms in a frozen part: they keep their statistics.

    These are norms whose parameters are all frozen, or, of those without parameters, the ones of
    the module before.
    """
    model.train()
    is_frozen = False
    for module in model.modules():
        if parameters := list(module.parameters(recurse=False)):
            is_frozen = not any(p.requires_grad for p in parameters)
        if is_frozen and hasattr(module, "running_mean"):
            module.eval()
