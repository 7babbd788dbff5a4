from __future__ import annotations

from typing import Any

import pytest

from accel_trainer.core.errors import ConfigError
from accel_trainer.training.config import TrainerConfig


@pytest.mark.parametrize(
    ("num_epochs", "every", "evaluated"),
    [(5, 1, [1, 2, 3, 4, 5]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (2, 9, [2])],
)
def test_a_run_evaluates_after_every_nth_epoch_and_the_last(
    num_epochs: int, every: int, evaluated: list[int]
) -> None:
    config = TrainerConfig(num_epochs=num_epochs, evaluate_every_n_epochs=every)
    assert [
        epoch for epoch in range(1, num_epochs + 1) if config.evaluates_after(epoch)
    ] == evaluated


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_epochs": -1}, "--epochs is -1: set it to 0 .evaluate only. or more"),
        ({"max_steps": 0}, "trainer.max_steps is 0: set it to 1 or more"),
        ({"log_every_n_steps": 0}, "trainer.log_every_n_steps is 0"),
        ({"evaluate_every_n_epochs": 0}, "trainer.evaluate_every_n_epochs is 0"),
        ({"patience": 0}, "trainer.patience is 0"),
        ({"max_grad_norm": 0.0}, "trainer.max_grad_norm is 0.0: set it above 0"),
        ({"max_time_s": -1.0}, "trainer.max_time_s is -1.0"),
        ({"ema_decay": 1.0}, "--ema is 1.0: set a decay between 0 and 1, such as 0.999"),
        ({"ema_decay": 0.0}, "--ema is 0.0"),
    ],
)
def test_a_setting_of_the_trainer_that_cannot_work_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainerConfig(**changes)


def test_settings_of_the_trainer_may_be_left_out() -> None:
    config = TrainerConfig(
        num_epochs=0, max_steps=None, max_grad_norm=None, ema_decay=None, patience=None
    )
    assert config.num_epochs == 0
