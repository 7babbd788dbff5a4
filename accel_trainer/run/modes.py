"""The modules of a run that are not in training mode: those that `--freeze` keeps out of it."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import nn


def put_into_training(model: nn.Module) -> list[str]:
    """Call `model.train()`; return the outermost modules that it takes out of evaluation mode.

    Only of a model that is itself in training mode: one that `from_pretrained` returned is in
    evaluation mode as a whole. What a `train` of the model's keeps in evaluation is none of them.
    """
    modules = dict(model.named_modules())
    given = [name for name in modules if model.training and not modules[name].training]
    model.train()
    switched = [name for name in given if modules[name].training]
    return [name for name in switched if not any(name.startswith(f"{on}.") for on in switched)]


def kept_in_evaluation(
    model: nn.Module, pattern: str | None, given: Collection[str]
) -> dict[str, nn.Module]:
    """Return the modules that `--freeze pattern` keeps in evaluation mode, by name.

    They are norms with statistics, and modules that are `given` in evaluation mode, of which the
    pattern finds all parameters; or all buffers, if they have no parameters.
    """
    if pattern is None:
        return {}
    kept = {}
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters()) or dict(module.named_buffers())
        if (
            tensors
            and (hasattr(module, "running_mean") or name in given)
            and all(re.search(pattern, f"{name}.{each}") for each in tensors)
        ):
            kept[name] = module
    return kept
