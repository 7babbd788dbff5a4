from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from accel_trainer.core.learning_rate import RATIO, SCALE, set_learning_rate


def test_every_group_gets_the_learning_rate_times_its_own_factors() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [
        {"params": first.parameters()},
        {"params": second.parameters(), RATIO: 0.2, SCALE: 0.5},
    ]
    optimizer = SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    set_learning_rate(optimizer, 0.2)  # the factors apply to the new value, not to the old one
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2 * 0.2 * 0.5]


def test_a_learning_rate_that_is_a_tensor_is_set_in_place() -> None:
    rate = torch.tensor(1.0)
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=rate)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
