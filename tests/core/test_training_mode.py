from __future__ import annotations

from torch import nn

from accel_trainer.core.training_mode import set_training_mode


def block(*, affine: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine), nn.Dropout())


def test_training_mode_reaches_every_module_of_a_trained_model() -> None:
    model = nn.Sequential(block(), block()).eval()
    set_training_mode(model)
    assert all(module.training for module in model.modules())


def test_a_frozen_norm_stays_in_evaluation_mode_and_dropout_does_not() -> None:
    model = nn.Sequential(block(), block())
    model[0].requires_grad_(False)
    set_training_mode(model)
    assert [module.training for module in model[0]] == [True, False, True]
    assert all(module.training for module in model[1])


def test_a_norm_without_parameters_is_frozen_with_the_layer_before_it() -> None:
    model = nn.Sequential(block(affine=False), block(affine=False))
    model[0][0].requires_grad_(False)
    set_training_mode(model)
    assert (model[0][1].training, model[1][1].training) == (False, True)
