"""The parameters that an optimizer steps."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of `optimizer`, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
