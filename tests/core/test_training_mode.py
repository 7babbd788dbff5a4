"""What modules compute from their weights when their mode changes is never of other weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_trainer.core.training_mode import evaluation_mode

from ..modules_with_modes import ZOO, MakeModule, fresh_output, inputs


@pytest.mark.parametrize("make", ZOO)
@pytest.mark.parametrize("is_training", [True, False])
def test_an_evaluation_is_of_the_weights_as_they_are(make: MakeModule, is_training: bool) -> None:
    model = make().train(is_training)
    for _ in range(3):
        model.train()
        for parameter in model.parameters():
            parameter.data.mul_(0.9).add_(0.01)
        expected = fresh_output(make, model)
        model.train(is_training)
        with evaluation_mode(model):
            assert not any(each.training for each in model.modules())
            torch.testing.assert_close(model(inputs()), expected)
        assert model.training == is_training


@pytest.mark.parametrize("make", ZOO)
@pytest.mark.parametrize("is_training", [True, False])
def test_an_evaluation_leaves_bits_and_modes(make: MakeModule, is_training: bool) -> None:
    model = nn.Sequential(make(), nn.Sequential(nn.Dropout()))
    model[1].train(is_training)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = -0.0
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with evaluation_mode(model):
        model(inputs())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]), name
        assert torch.equal(each.signbit(), before[name].signbit()), name
    assert [model.training, model[0].training] == [True, True]
    assert {each.training for each in model[1].modules()} == {is_training}
