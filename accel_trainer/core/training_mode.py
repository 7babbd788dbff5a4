"""Training mode, with norms in frozen parts that keep their statistics."""

from __future__ import annotations

from torch import nn


def set_training_mode(model: nn.Module) -> None:
    """Put `model` into training mode, except norms in frozen parts, which keep their statistics.

    A norm counts as frozen if all its parameters are frozen; if it has none, the last module before
    it that has parameters decides.
    """
    model.train()
    is_frozen = False
    for module in model.modules():
        if parameters := list(module.parameters(recurse=False)):
            is_frozen = not any(p.requires_grad for p in parameters)
        if is_frozen and hasattr(module, "running_mean"):
            module.eval()
