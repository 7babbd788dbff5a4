"""Builds the optimizer of a config. The trainer sets the learning rate before each step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..core.errors import ConfigError, reason_of
from ..core.learning_rate import RATIO
from ..core.parameters import Optimizers
from ..core.tensor_memory import is_dense
from ..distributed.streams import has_streams
from .config import OptimizerConfig, optimizer_class_of
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
    on_cpu = parameter.is_cpu
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


def keep_ratios(optimizers: Optimizers) -> None:
    """Let the groups of all optimizers keep the ratios of their rates to that of the first.

    0 stays 0.
    """
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    for group in groups:
        group[RATIO] = float(group["lr"]) / float(groups[0]["lr"])
