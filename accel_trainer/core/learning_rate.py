"""Learning rate schedules, and setting an optimizer's learning rate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

Schedule = Callable[[int], float]
"""Maps the completed optimizer steps (0 before the first) to the learning rate of the next one."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group, times the group's `learning_rate_scale` if it has one.

    A learning rate that is a tensor is set in place.
    """
    for group in optimizer.param_groups:
        value = learning_rate * group.get("learning_rate_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
