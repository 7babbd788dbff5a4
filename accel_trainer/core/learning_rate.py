"""Learning rate schedules, and setting an optimizer's learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

RATIO = "learning_rate_ratio"
"""The key of a parameter group for its rate relative to the schedule's, by config or optimizer."""
SCALE = "learning_rate_scale"
"""The key of a parameter group for a further factor, which only the user's hooks set."""

Schedule = Callable[[int], float]
"""Maps the completed optimizer steps (0 before the first) to the learning rate of the next one."""


@dataclass
class Decay:
    """Where a learning rate decays: in the steps after `start`, up to step `end`.

    With `--hours`, the run itself decides both while it trains.
    """

    start: int
    end: int

    def fraction_done(self, optimizer_step: int) -> float:
        """Return 0 until the decay begins, and 1 at its end."""
        return max(0, optimizer_step - self.start) / (self.end - self.start or 1)


def set_learning_rate(
    optimizer: Optimizer, learning_rate: float, reduced: Callable[[float], float] | None = None
) -> None:
    """Set the learning rate of every group: `learning_rate` times the factors of the group.

    `reduced` returns what becomes of the product; None: it stays. A learning rate that is a tensor
    is set in place.
    """
    for group in optimizer.param_groups:
        value = learning_rate * group.get(RATIO, 1.0) * group.get(SCALE, 1.0)
        if reduced is not None:
            value = reduced(value)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
