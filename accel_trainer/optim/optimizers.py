"""Optimizers and their parameter groups. The trainer sets the learning rate before each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ..core.config import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE
from ..distributed.streams import has_streams
from .muon import Muon


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adamw", "muon"] = "sgd"
    """`sgd` with momentum, `adamw`, or `muon`: Muon for the filters of convolutions and `sgd` for the rest."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
    """Peak learning rate, before the scaling below."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows global batch size / `base_batch_size`."""
    base_batch_size: int = 256
    """The global batch size that `learning_rate` was tuned at; used only for the scaling."""
    bias_learning_rate_scale: float = 1.0
    """Factor on the learning rate of vectors and scalars. Their weight decay is divided by it: it acts as before."""
    linear_learning_rate_scale: float = 1.0
    """The same for the matrices of linear layers, such as the head."""
    momentum: float = 0.9
    """Momentum of `sgd`."""
    filter_momentum: float = 0.6
    """Momentum of the filters under `muon`."""
    nesterov: bool = True
    """Nesterov's momentum, for `sgd`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments of `adamw`."""
    eps: float = 1e-8
    """Added to the denominator of `adamw`."""
    weight_decay: float = 5e-4
    """Coupled (L2) for `sgd`, decoupled for `adamw`."""
    decay_norms_and_biases: bool = False
    """Whether vectors and scalars (norm scales, biases) decay too."""

    def __post_init__(self) -> None:
        NOT_NEGATIVE.check(self, "optimizer", "learning_rate", "eps", "weight_decay")
        BELOW_ONE.check(self, "optimizer", "momentum", "filter_momentum", "betas")
        POSITIVE.check(self, "optimizer", "bias_learning_rate_scale", "linear_learning_rate_scale")
        AT_LEAST_ONE.check(self, "optimizer", "base_batch_size")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups of equal settings, by their number of dimensions."""
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            settings = tuple(_settings(parameter.ndim, config).items())
            groups.setdefault(settings, []).append((name, parameter))
    return [
        {"params": [p for _, p in named], "param_names": [n for n, _ in named], **dict(settings)}
        for settings, named in groups.items()
    ]


def _settings(num_dimensions: int, config: OptimizerConfig) -> dict[str, Any]:
    """Return what the group of a parameter sets differently from the optimizer."""
    if config.name == "muon" and num_dimensions > 2:
        return {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "filter_momentum": config.filter_momentum}
    scales = {
        0: config.bias_learning_rate_scale,
        1: config.bias_learning_rate_scale,
        2: config.linear_learning_rate_scale,
    }
    scale = scales.get(num_dimensions, 1.0)
    decays = num_dimensions > 1 or config.decay_norms_and_biases
    return {"weight_decay": config.weight_decay / scale if decays else 0.0, "learning_rate_scale": scale}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `model`'s trainable parameters on their device; fused where torch has a fused kernel."""
    groups = parameter_groups(model, config)
    devices = {p.device for p in model.parameters()}
    has_kernels = all(device.type == "cpu" or has_streams(device) for device in devices)
    fused = has_kernels and all(p.is_floating_point() for p in model.parameters())
    if config.name == "adamw":
        return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
    nesterov = config.nesterov and config.momentum > 0
    sgd = Muon if config.name == "muon" else SGD
    return sgd(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=nesterov, fused=fused)


def coming_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state after its first step: per weight one momentum, or two moments."""
    total = 0
    for group in optimizer.param_groups:
        per_weight = 2 if "betas" in group else bool(group.get("momentum") or group.get("filter_momentum"))
        total += per_weight * sum(p.numel() * p.element_size() for p in group["params"])
    return total


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group, times its `learning_rate_scale` if it has one; a tensor is set in place."""
    for group in optimizer.param_groups:
        value = learning_rate * group.get("learning_rate_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
