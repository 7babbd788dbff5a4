"""When checkpoints are due, and the settings that are refused."""

from __future__ import annotations

import pytest

from accel_trainer import CheckpointConfig, ConfigError, TrainState


@pytest.mark.parametrize(
    ("position", "is_due"),
    [
        ((0, 0, 0), False),
        ((3, 0, 3), False),
        ((4, 0, 4), True),
        ((5, 1, 0), False),
        ((10, 2, 0), True),
    ],
)
def test_saves_are_due_at_steps_and_at_ends_of_epochs(
    position: tuple[int, int, int], is_due: bool
) -> None:
    config = CheckpointConfig(every_n_steps=4, every_n_epochs=2)
    assert config.is_due(TrainState(*position)) is is_due


@pytest.mark.parametrize(
    "config",
    [{"keep_last_n": 1}, {"every_n_steps": 0}, {"max_failed_saves": 0}, {"keep_every_n_steps": -1}],
)
def test_a_config_that_could_lose_checkpoints_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        CheckpointConfig(**config)
