from __future__ import annotations

import torch

from accel_trainer.core.parameters import parameters_of


def test_the_parameters_of_an_optimizer_are_those_of_its_groups_in_order() -> None:
    first, second, third = (torch.zeros(1, requires_grad=True) for _ in range(3))
    groups = [{"params": [second, third]}, {"params": [first], "lr": 0.2}]
    found = parameters_of(torch.optim.SGD(groups, lr=0.1))
    assert [id(each) for each in found] == [id(second), id(third), id(first)]
