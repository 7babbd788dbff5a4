from __future__ import annotations

from typing import Any

import pytest

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.train_state import TrainState
from accel_trainer.training.config import TrainerConfig


@pytest.mark.parametrize(
    ("num_epochs", "every", "evaluated"),
    [
        (5, "1epoch", [4, 8, 12, 16, 20]),
        (5, "2epochs", [8, 16, 20]),
        (4, "2 epochs", [8, 16]),
        (2, "9epochs", [8]),
        (2, "0.5epochs", [2, 4, 6, 8]),
        (2, ".75epochs", [3, 6, 8]),
        (2, "0.3epochs", [2, 3, 4, 5, 6, 8]),
        (2, "0.01epochs", [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, "3steps", [3, 6, 8]),
        (2, "1step", [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_run_evaluates_at_every_interval_and_at_its_end(
    num_epochs: int, every: str, evaluated: list[int]
) -> None:
    """Steps after which it does; an epoch has 4."""
    config = TrainerConfig(num_epochs=num_epochs, evaluate_every=every)
    positions = [
        TrainState(optimizer_step=4 * epoch + step, epoch=epoch, step_in_epoch=step)
        for epoch in range(num_epochs)
        for step in (1, 2, 3, 4)
    ]
    assert [
        position.optimizer_step for position in positions if config.evaluates_after(position, 4)
    ] == evaluated


@pytest.mark.parametrize("every", ["", "0steps", "0.0epochs", "1.5steps", "5", "-1epoch", "often"])
def test_an_interval_that_cannot_be_is_refused(every: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluate_every= is '{every}': set it to some steps"):
        TrainerConfig(evaluate_every=every)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_epochs": -1}, "trainer.num_epochs is -1: set it to at least 0"),
        ({"max_steps": 0}, "trainer.max_steps is 0: set it to 1 or more"),
        ({"log_every_n_steps": 0}, "trainer.log_every_n_steps is 0"),
        ({"patience": 0}, "trainer.patience is 0"),
        ({"max_grad_norm": 0.0}, "trainer.max_grad_norm is 0.0: set it above 0"),
        ({"max_time_s": -1.0}, "trainer.max_time_s is -1.0"),
        ({"ema_decay": 1.0}, "trainer.ema_decay is 1.0: set it above 0 and below 1"),
        ({"ema_decay": 0.0}, "trainer.ema_decay is 0.0"),
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
