"""Tells the learning rates that follow from the names of parameters."""

from __future__ import annotations

from ..core.learning_rate import RATIO
from ..core.parameters import Optimizers


def describe_rates(optimizers: Optimizers) -> str:
    """Return a line for the banner: each ratio to the schedule's rate, with its first parameter."""
    first = {
        group.get(RATIO, 1.0): group["param_names"][0]
        for optimizer in optimizers.values()
        for group in reversed(optimizer.param_groups)
        if "param_names" in group
    }
    rates = ", ".join(f"{first[ratio]} x {ratio:.3g}" for ratio in sorted(first))
    return f"\nlearning rates from {rates}" * (len(first) > 1)
