"""Builds the optimizer of a config. The trainer sets the learning rate before each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.errors import ConfigError
from ..core.tensor_memory import is_dense
from ..distributed.streams import has_streams
from .config import UNSUITABLE, OptimizerConfig, optimizer_class_of
from .evaluation_weights import has_evaluation_weights
from .parameter_groups import parameter_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `model`'s trainable parameters on their device; fused where torch has a fused kernel.

    Raises:
        ConfigError: all parameters are frozen, or torch's class refuses them or the settings.
    """
    config, groups = config.with_learning_rate(), parameter_groups(model, config)
    if not groups:
        raise ConfigError("FREEZE", "all parameters of the model are frozen: leave some to train")
    optimizer_class = optimizer_class_of(config.name)
    fused = not any(why_not_fused(optimizer_class, p) for group in groups for p in group["params"])
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "momentum": config.momentum,
        "nesterov": config.nesterov and config.momentum > 0,
        "betas": config.betas,
        "eps": config.eps,
        "fused": fused,
    }
    if issubclass(optimizer_class, SGD):
        del settings["betas"], settings["eps"]
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(optimizer_class).parameters.items()
    }
    # the eps of Adafactor is one
    is_pair = {name: isinstance(default, tuple) for name, default in defaults.items()}
    known = {
        name: value
        for name, value in settings.items()
        if is_pair.get(name) == isinstance(value, tuple)
    }
    try:
        return optimizer_class(groups, **known)
    except (TypeError, ValueError, RuntimeError) as error:
        fact = f"torch.optim.{config.name} rejects this model or these settings ({str(error).splitlines()[0]})"
        raise ConfigError("CONFIG", f"{fact}: choose another --optimizer.name") from error


def why_not_fused(optimizer_class: type[Optimizer], parameter: Tensor) -> str | None:
    """Return why torch's fused kernel would not step `parameter` correctly, and None if it does.

    It decides by what a resumed run has, too. In half precision the other kernels compute in
    float32, and are better than unfused.
    """
    on_cpu = parameter.device.type == "cpu"
    if not on_cpu and not has_streams(parameter.device):
        return f"is on {parameter.device.type}"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}"
    if (
        on_cpu
        and issubclass(optimizer_class, SGD)
        and parameter.dtype not in (torch.float32, torch.float64)
    ):
        return f"is {parameter.dtype}"  # neither steps nor momentum are right (torch 2.13)
    return None if is_dense(parameter) else "is a view with gaps"


def make_ready(optimizer: Optimizer) -> None:
    """Let a prepared `optimizer` take its first step, or the first one after a resume."""
    if has_evaluation_weights(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # it has, see above
    if isinstance(optimizer, SGD):
        fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(fill_momentum)


def fill_momentum(optimizer: Optimizer) -> None:
    """Let SGD's fused kernel find a momentum for every parameter before the first step, and after a resume.

    Without one, a first gradient after the first step is a TypeError, and a first step that a NaN
    skips leaves uninitialised memory (torch 2.13). It is -0.0, so that the first step has the bits
    that it has without one.
    """
    groups = [group for group in optimizer.param_groups if group["fused"]]
    for parameter in (
        parameter for group in groups if group["momentum"] for parameter in group["params"]
    ):
        if optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, -0.0)


def build_own_optimizer(build: Callable[[nn.Module], Optimizer], model: nn.Module) -> Optimizer:
    """Return the optimizer that a recipe builds for `model`.

    When a schedule sets the learning rates of its groups, they keep their ratios to that of the
    first; 0 stays 0.

    Raises:
        ConfigError: it is no optimizer of this model's trainable parameters.
    """
    is_function = callable(build) and not str(getattr(build, "__module__", "")).startswith(
        "torch.optim"
    )
    optimizer = build(model) if is_function else build
    if not is_function or not isinstance(optimizer, Optimizer):
        fact = f"optimizer= {'returns' if is_function else 'is'} an object of type {type(optimizer).__name__}"
        raise ConfigError(
            "CONFIG", f"{fact}: pass a function that takes the model and returns a torch optimizer"
        )
    if reason := UNSUITABLE.get(type(optimizer).__name__):
        raise ConfigError(
            "CONFIG",
            f"the recipe's optimizer is {type(optimizer).__name__}, but {reason}: use another",
        )
    try:
        # a scheduler replaces that of the instance
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        fact = f"{type(optimizer).__name__}.step cannot be called without arguments ({error})"
        raise ConfigError(
            "CONFIG", f"{fact}: a step is one forward and backward, so use another optimizer"
        ) from error
    _check_parameters(optimizer, model)
    _check_fused(optimizer, model)
    base = float(optimizer.param_groups[0]["lr"])
    if base <= 0:
        raise ConfigError(
            "CONFIG", f"the first group of the recipe's optimizer has lr {base}: set it above 0"
        )
    for group in optimizer.param_groups:
        group["learning_rate_scale"] = float(group["lr"]) / base
    return optimizer


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ConfigError for parameters that only the optimizer has, or that only the model trains."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not theirs <= parameters.keys():
        fact = "the recipe's optimizer has parameters that are not the model's"
        raise ConfigError("CONFIG", f"{fact}: build it from the model that the function receives")
    # Their gradients would be added up over all steps, and be part of the norm that is clipped.
    if left_out := [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in theirs
    ]:
        fact = f"the recipe's optimizer has {len(theirs)} parameters, without {', '.join(left_out[:3])}"
        raise ConfigError(
            "CONFIG", f"{fact}: add them, or freeze them by --freeze or requires_grad_(False)"
        )


def _check_fused(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ConfigError for a fused optimizer whose kernel is wrong for a parameter or a setting."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        wrong = [
            f"{names[id(p)]}, which {why}"
            for p in group["params"]
            if (why := why_not_fused(type(optimizer), p))
        ]
        if isinstance(optimizer, SGD) and group["momentum"] and group["dampening"]:
            wrong = [f"a dampening of {group['dampening']}"]
        if wrong:
            fact = (
                f"the recipe's optimizer is fused, and torch's kernel does not support {wrong[0]}"
            )
            raise ConfigError("CONFIG", f"{fact}: pass fused=False")
