"""Builds the optimizer of a config. The trainer sets the learning rate before each step."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.errors import ConfigError, listed, reason_of
from ..core.parameters import Optimizers, parameters_of
from ..core.tensor_memory import is_dense
from ..distributed.streams import has_streams
from .config import UNSUITABLE, OptimizerConfig, optimizer_class_of
from .evaluation_weights import has_evaluation_weights
from .parameter_groups import parameter_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `model`'s trainable parameters, fused if torch has a fused kernel.

    Raises:
        ConfigError: all parameters are frozen, or torch's class refuses them or the settings.
    """
    config = config.with_defaults()
    groups = parameter_groups(model, config)
    if not groups:
        raise ConfigError("FREEZE", "all parameters of the model are frozen: leave some to train")
    optimizer_class = optimizer_class_of(config.name)
    fused = not any(why_not_fused(optimizer_class, p) for group in groups for p in group["params"])
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "momentum": config.momentum,
        "nesterov": config.nesterov and config.momentum != 0,
        "betas": config.betas,
        "eps": config.eps,
        "fused": fused,
    }
    parameters = inspect.signature(optimizer_class).parameters
    # Some classes need a pair for a setting that is a number here, such as the eps of Adafactor.
    known = {
        name: value
        for name, value in settings.items()
        if name in parameters
        and isinstance(parameters[name].default, tuple) == isinstance(value, tuple)
    }
    try:
        return optimizer_class(groups, **known)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "CONFIG",
            f"torch.optim.{config.name} rejects this model or these settings ({reason_of(error)}): "
            "choose a different --optimizer.name",
        ) from error


def why_not_fused(optimizer_class: type[Optimizer], parameter: Tensor) -> str | None:
    """Return why torch's fused kernel would not step `parameter` correctly; None if it would.

    The answer does not change in a resumed run. In half precision, other fused kernels than SGD's
    on the CPU compute in float32, and are more exact than unfused ones.
    """
    on_cpu = parameter.device.type == "cpu"
    if not on_cpu and not has_streams(parameter.device):
        return f"is on {parameter.device.type}"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}"
    is_half = parameter.dtype not in (torch.float32, torch.float64)
    if is_half and on_cpu and issubclass(optimizer_class, SGD):
        return f"is {parameter.dtype}"  # steps and momentum are wrong (torch 2.13)
    return None if is_dense(parameter) else "is a view with gaps"


def make_ready(optimizer: Optimizer) -> None:
    """Prepare `optimizer` for its first step, and for the first step after a resume."""
    if has_evaluation_weights(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # as has_evaluation_weights has found
    if isinstance(optimizer, SGD):
        fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(fill_momentum)


def fill_momentum(optimizer: Optimizer) -> None:
    """Give SGD's fused kernel a momentum buffer for every parameter that has none.

    Without it, a parameter whose first gradient comes after the first step causes a TypeError, and
    a first step that a NaN skips leaves uninitialised memory (torch 2.13). The buffer is -0.0, so
    that the first step has the same bits as without it.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.full_like(parameter, -0.0)


def build_own_optimizers(
    builders: Mapping[str, Callable[[nn.Module], Optimizer]], model: nn.Module
) -> Optimizers:
    """Return the optimizers that a recipe builds for `model`, by name.

    The learning rates of all groups keep their ratios to that of the first group when a schedule
    sets them; 0 stays 0.

    Raises:
        ConfigError: they are no optimizers, or do not share out this model's trainable parameters.
    """
    optimizers = {name: _build_own(build, model) for name, build in builders.items()}
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
    for group, rate in zip(groups, rates, strict=True):
        group["learning_rate_scale"] = rate / rates[0]
    return optimizers


def _build_own(build: Callable[[nn.Module], Optimizer], model: nn.Module) -> Optimizer:
    is_function = callable(build) and build not in vars(torch.optim).values()
    optimizer = build(model) if is_function else build
    if not is_function or not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "CONFIG",
            f"optimizer= {'returns' if is_function else 'is'} an object of type "
            f"{type(optimizer).__name__}: "
            "pass a function that takes the model and returns a torch optimizer",
        )
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
    return optimizer


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
            f"the recipe's optimizer{'s have' if len(optimizers) > 1 else ' has'} {len(theirs)} "
            f"parameters, without {listed(left_out)}: "
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
