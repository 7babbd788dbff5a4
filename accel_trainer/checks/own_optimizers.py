"""Refuses optimizers of a recipe's own that could not train its model as they are meant to."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from ..core.errors import ConfigError, listed
from ..core.parameters import Optimizers, parameters_of
from ..core.wording import counted
from ..optim.config import UNSUITABLE
from ..optim.optimizers import why_not_fused


def check_own_optimizers(optimizers: Optimizers, model: nn.Module) -> None:
    """Raise ConfigError unless they share out the parameters of `model`, each with a rate."""
    for optimizer in optimizers.values():
        _check_class(optimizer, model)
    _check_parameters(optimizers, model)
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    # A scheduler of torch leaves it there.
    if any("initial_lr" in group for group in groups):
        raise ConfigError(
            "SCHEDULE",
            "the recipe's optimizer has a scheduler, which would never step: remove it, and pass "
            "build_trainer schedule=schedule_from_torch(lambda optimizer: ..., learning_rate=...)",
        )
    rates = [_rate_of(group) for group in groups]
    if rates[0] == 0:
        raise ConfigError(
            "CONFIG", "the first group of the recipe's optimizer has lr 0: set it above 0"
        )


def _check_class(optimizer: Optimizer, model: nn.Module) -> None:
    if reason := UNSUITABLE.get(type(optimizer).__name__):
        raise ConfigError(
            "CONFIG",
            f"the recipe's optimizer is {type(optimizer).__name__}, but {reason}: use another",
        )
    try:
        # Of the class, since a scheduler replaces the `step` of the instance.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise ConfigError(
            "CONFIG",
            f"{type(optimizer).__name__}.step cannot be called without arguments ({error}): "
            "a step is one forward and backward, so use another optimizer",
        ) from error
    _check_fused(optimizer, model)


def _rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group. Raises ConfigError if it has none."""
    with suppress(TypeError, ValueError, RuntimeError):
        if 0 <= (rate := float(group.get("lr"))) < math.inf:  # type: ignore[arg-type]  # caught
            return rate
    raise ConfigError(
        "CONFIG",
        f"a group of the recipe's optimizer has lr {group.get('lr')!r:.40}: set a number, such "
        "as lr=1e-3 (the optimizers of transformers also take relative_step=False)",
    )


def _check_parameters(optimizers: Optimizers, model: nn.Module) -> None:
    """Raise ConfigError unless one optimizer has each of the parameters that the model trains."""
    theirs = Counter(each for own in optimizers.values() for each in {*parameters_of(own)})
    if not theirs.keys() <= set(model.parameters()):
        raise ConfigError(
            "CONFIG",
            "the recipe's optimizer has parameters that are not the model's: "
            "build it from the model that the function receives",
        )
    if shared := [name for name, p in model.named_parameters() if theirs[p] > 1]:
        raise ConfigError(
            "CONFIG",
            f"more than one of the recipe's optimizers ({', '.join(optimizers)}) has "
            f"{listed(shared)}: give each parameter to one of them",
        )
    # The gradients of the others would add up over all steps, and count in the clipped norm.
    if left_out := [
        name for name, p in model.named_parameters() if p.requires_grad and p not in theirs
    ]:
        raise ConfigError(
            "CONFIG",
            f"the recipe's optimizer{'s have' if len(optimizers) > 1 else ' has'} "
            f"{counted(len(theirs), 'parameter')}, without {listed(left_out)}: "
            "add them, or freeze them by --freeze or requires_grad_(False)",
        )


def _check_fused(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ConfigError for a fused optimizer if its kernel is wrong for a parameter or setting."""
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        wrong = [
            f"{names.get(p, 'a parameter')}, which {why}"
            for p in group["params"]
            if (why := why_not_fused(type(optimizer), p))
        ]
        if isinstance(optimizer, SGD) and group["momentum"] and group["dampening"]:
            wrong = [f"a dampening of {group['dampening']}"]
        if wrong:
            raise ConfigError(
                "CONFIG",
                "the recipe's optimizer is fused, and torch's kernel does not support "
                f"{wrong[0]}: pass fused=False",
            )
