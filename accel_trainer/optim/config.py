"""The settings of the optimizer, and the optimizers by name."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import torch
from torch.optim import SGD, AdamW, Optimizer

from ..core.config import (
    AT_LEAST_ONE,
    BELOW_ONE,
    INSIDE_ONE,
    NOT_NEGATIVE,
    Config,
    check_pattern,
    short_flag,
)
from ..core.errors import ConfigError
from .muon import Muon

# These names win over the classes of torch.optim, which has a `Muon` that trains no filters.
_SHORT_NAMES: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "muon": Muon}
_LEARNING_RATES = {"sgd": 0.1, "muon": 0.1, "adamw": 1e-3}
# Of the short names, and of the classes that do not have the setting.
_DEFAULTS = {"momentum": 0.9, "eps": 1e-8}
UNSUITABLE = {
    "LBFGS": "it needs several forwards for a step",
    "SparseAdam": "it needs sparse gradients",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """The optimizer and its learning rate."""

    name: str = "sgd"
    """`sgd` with momentum, `adamw`, `muon` (Muon for the filters of convolutions and `sgd` for the
    rest), or a class of torch.optim such as `RMSprop`, which gets the settings below that it
    accepts."""
    learning_rate: Annotated[float | None, short_flag("--lr")] = None
    """Peak learning rate, before `learning_rate_scaling`; None: 0.1 for sgd and muon, 0.001 for
    adamw, else torch's."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with global batch size / `base_batch_size`."""
    base_batch_size: int = 256
    """The global batch size that `learning_rate` was tuned for; used only for the scaling."""
    momentum: float | None = None
    """Momentum of `sgd`; None: 0.9; for classes of torch their default, mostly 0."""
    filter_momentum: float = 0.6
    """Momentum of the filters under `muon`."""
    nesterov: bool = True
    """Nesterov's momentum, for `sgd`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments of `adamw`."""
    eps: float | None = None
    """Added to the denominator of `adamw`; None: 1e-8; for classes of torch their default."""
    weight_decay: float = 5e-4
    """Coupled (L2) for `sgd`, decoupled for `adamw`."""
    decay_norms_and_biases: bool = False
    """Whether vectors and scalars (norm scales, biases) decay too."""
    layer_decay: float | None = None
    """Factor on the learning rate from each numbered block of layers to the one before it; None:
    the same for all."""
    learning_rate_scales: tuple[str, ...] = ()
    """`PATTERN=FACTOR`: a factor on the learning rate of the parameters whose names match the
    regular expression, such as `^head=10`. If several patterns match a name, the last counts."""
    weight_decays: tuple[str, ...] = ()
    """`PATTERN=DECAY`: the weight decay of these parameters, such as `norm|bias=0`."""
    freeze: Annotated[str | None, short_flag("--freeze")] = None
    """Freeze parameters whose names match this regular expression; their BatchNorms keep their
    statistics."""

    def __post_init__(self) -> None:
        optimizer_class_of(self.name)
        NOT_NEGATIVE.check(self, "optimizer", "learning_rate", "eps", "weight_decay")
        BELOW_ONE.check(self, "optimizer", "momentum", "filter_momentum", "betas")
        AT_LEAST_ONE.check(self, "optimizer", "base_batch_size")
        INSIDE_ONE.check(self, "optimizer", "layer_decay")
        check_pattern(self, "optimizer", "freeze")
        pattern_values(self, "learning_rate_scales")
        pattern_values(self, "weight_decays")

    def with_defaults(self) -> OptimizerConfig:
        """Return the config without None for numbers, so that a run records their defaults."""
        known = dict(_DEFAULTS, lr=_LEARNING_RATES.get(self.name, 0.0))
        if self.name not in _SHORT_NAMES:
            parameters = inspect.signature(optimizer_class_of(self.name)).parameters
            known |= {
                name: each.default
                for name, each in parameters.items()
                # The eps of Adafactor is a pair, which stays torch's.
                if type(each.default) in (int, float)
            }
        fields = {"learning_rate": "lr", "momentum": "momentum", "eps": "eps"}
        missing: dict[str, Any] = {
            ours: known[name] for ours, name in fields.items() if getattr(self, ours) is None
        }
        return replace(self, **missing)

    def peak_learning_rate(self, *, global_batch_size: int) -> float:
        """Return the learning rate, which was tuned at `base_batch_size`, for another batch size.

        Linear: Goyal et al. 2017 (arXiv 1706.02677), for SGD. Square root: Krizhevsky 2014
        (arXiv 1404.5997) and Malladi et al. 2022 (arXiv 2205.10287), for adaptive optimizers.
        """
        learning_rate = self.with_defaults().learning_rate
        assert learning_rate is not None
        ratio = global_batch_size / self.base_batch_size
        factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
        return learning_rate * factors[self.learning_rate_scaling]


def pattern_values(config: OptimizerConfig, setting: str) -> dict[str, float]:
    """Return the numbers by pattern of a setting `PATTERN=NUMBER ...`. Raises ConfigError."""
    values = {}
    for text in getattr(config, setting):
        pattern, _, number = text.rpartition("=")
        try:
            values[re.compile(pattern).pattern] = float(number)
            if not NOT_NEGATIVE.has(values[pattern]):
                raise ValueError("a number from 0 is needed")
        except (re.error, ValueError) as error:
            raise ConfigError(
                "CONFIG", f"optimizer.{setting} has {text!r} ({error}): write PATTERN=NUMBER"
            ) from None
    return values


def optimizer_class_of(name: str) -> type[Optimizer]:
    """Return the optimizer of that name. Only torch.optim is searched: no name imports code."""
    if name in UNSUITABLE:
        raise ConfigError(
            "CONFIG", f"--optimizer.name is {name}, but {UNSUITABLE[name]}: choose a different one"
        )
    classes = {key: value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    del classes["Optimizer"]  # the base class
    if name in (known := classes | _SHORT_NAMES):
        return known[name]
    spelt = {key.lower(): key for key in known}
    near = get_close_matches(name.lower(), spelt)
    hint = f"did you mean {spelt[near[0]]}? " if near else ""
    raise ConfigError(
        "CONFIG",
        f"--optimizer.name is {name}, which does not exist: {hint}"
        "it is sgd, adamw, muon or a class of torch.optim, such as RMSprop",
    )
