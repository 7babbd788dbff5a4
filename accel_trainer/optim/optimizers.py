"""Builds the optimizer of a config. The trainer sets the learning rate before each step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.errors import ConfigError
from ..distributed.streams import has_streams
from .config import OptimizerConfig, optimizer_class_of
from .parameter_groups import parameter_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `model`'s trainable parameters on their device; fused where torch has a fused kernel.

    Raises:
        ConfigError: torch's class refuses the settings or the parameters.
    """
    config, groups = config.with_learning_rate(), parameter_groups(model, config)
    devices = {p.device for p in model.parameters()}
    has_kernels = all(device.type == "cpu" or has_streams(device) for device in devices)
    fused = has_kernels and all(p.is_floating_point() for p in model.parameters())
    optimizer_class = optimizer_class_of(config.name)
    settings: dict[str, Any] = {
        "lr": config.learning_rate, "momentum": config.momentum, "nesterov": config.nesterov and config.momentum > 0,
        "betas": config.betas, "eps": config.eps, "fused": fused,
    }  # fmt: skip
    if issubclass(optimizer_class, SGD):
        del settings["betas"], settings["eps"]
    defaults = {name: parameter.default for name, parameter in inspect.signature(optimizer_class).parameters.items()}
    is_pair = {name: isinstance(default, tuple) for name, default in defaults.items()}  # the eps of Adafactor is one
    known = {name: value for name, value in settings.items() if is_pair.get(name) == isinstance(value, tuple)}
    try:
        return optimizer_class(groups, **known)
    except (TypeError, ValueError, RuntimeError) as error:
        fact = f"torch.optim.{config.name} refuses this model or these settings ({str(error).splitlines()[0]})"
        raise ConfigError("CONFIG", f"{fact}: choose another --optimizer.name") from error


def coming_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state after its first step: per weight one momentum, or two moments."""
    total = 0
    for group in optimizer.param_groups:
        has_momentum = bool(group.get("momentum") or group.get("filter_momentum"))
        per_weight = has_momentum if isinstance(optimizer, SGD) else 2
        total += per_weight * sum(p.numel() * p.element_size() for p in group["params"])
    return total


def scale_groups(optimizer: Optimizer) -> Optimizer:
    """Let the learning rates of an optimizer's groups keep their ratios to that of the first when a schedule sets them.

    A group whose rate is 0 stays at 0.
    """
    base = float(optimizer.param_groups[0]["lr"])
    if base <= 0:
        raise ConfigError("CONFIG", f"the first group of the recipe's optimizer has lr {base}: set it above 0")
    for group in optimizer.param_groups:
        group["learning_rate_scale"] = float(group["lr"]) / base
    return optimizer


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group, times its `learning_rate_scale` if it has one; a tensor is set in place."""
    for group in optimizer.param_groups:
        value = learning_rate * group.get("learning_rate_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
