"""The learning rates of a step, as rows report them."""

from __future__ import annotations

from ..core.learning_rate import RATIO, SCALE
from ..core.parameters import Optimizers


def learning_rates(optimizers: Optimizers) -> dict[str, float]:
    """Return the rates that the last step had, by the names that rows give them.

    `optim/learning_rate` is that of the groups that follow the schedule, or else of the first.
    Other groups whose factors differ follow by their number, from 1. Named optimizers have rates of
    their own, such as `optim/critic/learning_rate`. **Host sync** if rates are tensors.
    """
    found: dict[str, float] = {}
    for name, optimizer in optimizers.items():
        place = f"optim/{name}/learning_rate" if name else "optim/learning_rate"
        groups = optimizer.param_groups
        factors = [(group.get(RATIO, 1.0), group.get(SCALE, 1.0)) for group in groups]
        # Those that follow the schedule, or else have its ratio, or else the first.
        leading = max(range(len(groups)), key=lambda at: (factors[at][0] == 1, factors[at][1] == 1))
        found[place] = float(groups[leading]["lr"])
        for number, group in enumerate(groups):
            if factors[number] not in (factors[leading], *factors[:number]):
                found[f"{place}_{number + 1}"] = float(group["lr"])
    return {"optim/learning_rate": next(iter(found.values())), **found}
