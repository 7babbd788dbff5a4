"""Runs with an optimizer and a schedule of the user's are in `test_own_optimizer.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from accel_trainer import OptimizerConfig, RecipeConfig, ScheduleConfig, TrainerConfig
from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.errors import ConfigError
from accel_trainer.run.config import with_defaults
from accel_trainer.run.optimization import (
    describe_length,
    plan_learning_rate,
    plan_optimization,
)

PLAN = BatchPlan(num_samples=80, global_batch_size=16, per_device_batch_size=16)  # 5 steps an epoch


def config_of(*, max_steps: int | None = None, **changes: Any) -> RecipeConfig:
    return with_defaults(
        RecipeConfig(trainer=TrainerConfig(num_epochs=3, max_steps=max_steps), **changes)
    )


@pytest.mark.parametrize(
    ("max_steps", "num_steps", "said"),
    [
        (None, 15, "3 epochs, 15 steps"),
        (8, 8, "3 epochs, 8 steps (--max-steps)"),
        (
            7,
            7,
            "3 epochs, 7 steps (--max-steps, on the schedule of 15 steps; for a schedule of its "
            "own: --steps 7)",
        ),
        (99, 15, "3 epochs, 15 steps"),
    ],
)
def test_the_length_of_a_run_is_that_of_its_epochs_up_to_max_steps(
    max_steps: int | None, num_steps: int, said: str
) -> None:
    config = config_of(max_steps=max_steps)
    assert config.trainer.last_step(PLAN.steps_per_epoch) == num_steps
    assert describe_length(config, PLAN) == said


def test_the_learning_rate_of_a_run_covers_all_epochs() -> None:
    schedule = ScheduleConfig(shape="linear", warmup_epochs=0)
    for max_steps in (None, 7):
        peak, learning_rate_at = plan_learning_rate(
            config_of(max_steps=max_steps, schedule=schedule), PLAN
        )
        assert learning_rate_at(0) == pytest.approx(peak)
        assert learning_rate_at(7) == pytest.approx(peak * 8 / 15)


def test_the_config_scales_its_learning_rate_to_the_batch() -> None:
    optimizer = OptimizerConfig(
        learning_rate=0.4, learning_rate_scaling="linear", base_batch_size=64
    )
    optimization = plan_optimization(
        config_of(optimizer=optimizer), nn.Linear(2, 2), PLAN, None, None
    )
    assert isinstance(optimization.optimizers[""], SGD)
    assert (optimization.description, optimization.num_steps) == ("peak learning rate 0.1", 15)


def test_an_optimization_has_the_optimizer_and_schedule_of_the_recipe() -> None:
    model = nn.Linear(2, 2)
    optimization = plan_optimization(
        config_of(), model, PLAN, lambda net: AdamW(net.parameters(), lr=0.25), lambda step: 0.5
    )
    assert isinstance(optimization.optimizers[""], AdamW)
    assert [optimization.schedule(step) for step in (0, 14)] == [0.5, 0.5]
    peak = plan_optimization(
        config_of(), model, PLAN, lambda net: AdamW(net.parameters(), lr=0.25), None
    )
    assert peak.description == "peak learning rate 0.25"


def test_settings_without_effect_on_an_optimization_are_refused() -> None:
    config = config_of(optimizer=OptimizerConfig(momentum=0.5))
    with pytest.raises(ConfigError, match="optimizer.momentum has no effect"):
        plan_optimization(
            config, nn.Linear(2, 2), PLAN, lambda net: SGD(net.parameters(), lr=0.1), None
        )
    config = replace(config, schedule=ScheduleConfig(shape="cosine", warmup_epochs=1))
    with pytest.raises(ConfigError, match="schedule.* has no effect: the recipe sets a schedule"):
        plan_optimization(config, nn.Linear(2, 2), PLAN, None, lambda step: 0.5)
