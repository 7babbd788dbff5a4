from __future__ import annotations

import math

import pytest

from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.errors import ConfigError
from accel_trainer.optim.lr_scheduler import (
    Schedule,
    ScheduleConfig,
    build_schedule,
)

SHAPES = (
    "constant",
    "cosine",
    "exponential",
    "linear",
    "polynomial",
    "step",
    "triangular",
    "trunk",
)


def schedule(*, total_steps: int = 100, steps_per_epoch: int = 10, **config: object) -> Schedule:
    return build_schedule(
        ScheduleConfig(**config),
        peak_learning_rate=2.0,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"shape": "constant"}, {0: 2.0, 50: 2.0, 99: 2.0, 100: 2.0}),
        ({"shape": "cosine"}, {0: 2.0, 25: 1 + math.sqrt(0.5), 50: 1.0, 100: 0.0}),
        ({"shape": "cosine", "min_fraction": 0.1}, {0: 2.0, 50: 1.1, 100: 0.2}),
        ({"shape": "linear"}, {0: 2.0, 25: 1.5, 99: 0.02, 100: 0.0}),
        ({"shape": "polynomial", "power": 2.0}, {0: 2.0, 50: 0.5, 90: 0.02, 100: 0.0}),
        ({"shape": "exponential", "gamma": 0.5}, {0: 2.0, 1: 1.0, 3: 0.25, 101: 2.0**-100}),
        (
            {"shape": "exponential", "gamma": 2.0, "warmup_epochs": 1.0},
            {0: 0.2, 9: 2.0, 10: 2.0, 13: 16.0},
        ),
        ({"shape": "step"}, {0: 2.0, 49: 2.0, 50: 0.2, 74: 0.2, 75: 0.02, 100: 0.02}),
        (
            {"shape": "step", "milestones": (0.6, 0.3), "gamma": 0.5},
            {29: 2.0, 30: 1.0, 59: 1.0, 60: 0.5},
        ),
        (
            {"shape": "linear", "warmup_epochs": 2.0},
            {0: 0.1, 9: 1.0, 19: 2.0, 20: 2.0, 60: 1.0, 100: 0.0},
        ),
        ({"shape": "step", "warmup_epochs": 2.0}, {59: 2.0, 60: 0.2, 79: 0.2, 80: 0.02}),
        ({"shape": "triangular"}, {0: 0.08, 24: 2.0, 25: 2.0, 40: 1.6, 100: 0.0}),
        ({"shape": "triangular", "peak_fraction": 0.0}, {0: 2.0, 50: 1.0, 100: 0.0}),
        ({"shape": "triangular", "peak_fraction": 1.0}, {0: 0.02, 99: 2.0}),
        ({"shape": "constant", "warmup_epochs": 10.0}, {0: 0.02, 49: 1.0, 99: 2.0, 100: 2.0}),
        ({"shape": "trunk", "warmup_epochs": 1.0}, {0: 0.2, 9: 2.0, 10: 2.0, 99: 2.0, 200: 2.0}),
        (
            {"shape": "trunk", "warmup_epochs": 1.0, "decay_at": 60},
            {0: 0.2, 9: 2.0, 60: 2.0, 61: 2 - 2 * math.sqrt(1 / 40), 70: 1.0, 100: 0.0},
        ),
        (
            {"shape": "trunk", "decay_at": 60, "decay_shape": "linear", "min_fraction": 0.1},
            {0: 2.0, 60: 2.0, 70: 1.55, 80: 1.1, 100: 0.2},
        ),
    ],
)
def test_the_curve_has_its_values_at_ends_warmup_and_milestones(
    config: dict[str, object], values: dict[int, float]
) -> None:
    learning_rate_at = schedule(**config)
    for step, value in values.items():
        assert learning_rate_at(step) == pytest.approx(value, rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("total_steps", [1, 2, 3, 97])
@pytest.mark.parametrize("min_fraction", [0.0, 0.3])
def test_the_learning_rate_rises_to_its_peak_once_and_falls_to_its_floor(
    shape: str, total_steps: int, min_fraction: float
) -> None:
    warmup = {} if shape == "triangular" else {"warmup_epochs": total_steps / 40}
    learning_rate_at = schedule(
        shape=shape, total_steps=total_steps, min_fraction=min_fraction, **warmup
    )
    # a run may be asked for more
    curve = [learning_rate_at(step) for step in range(total_steps + 5)]
    top = curve.index(max(curve))
    assert curve[: top + 1] == sorted(curve[: top + 1])
    assert curve[top:] == sorted(curve[top:], reverse=True)
    assert max(curve) == 2.0
    assert min(curve[top:]) >= 2.0 * min_fraction
    assert min(curve[:total_steps]) > 0  # no step of the run is trained in vain


def test_a_step_depends_only_on_its_number() -> None:
    learning_rate_at = schedule(warmup_epochs=1.5)
    forward = [learning_rate_at(step) for step in range(100)]
    assert [learning_rate_at(step) for step in reversed(range(100))] == forward[::-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_learning_rate_is_the_same_for_any_processes_and_accumulation(shape: str) -> None:
    curves = set()
    for num_processes, micro in ((1, 12), (2, 6), (4, 3), (2, 3), (1, 4)):
        plan = BatchPlan(
            num_samples=100,
            global_batch_size=12,
            per_device_batch_size=micro,
            num_processes=num_processes,
        )
        steps = plan.steps_per_epoch
        learning_rate_at = schedule(shape=shape, total_steps=3 * steps, steps_per_epoch=steps)
        curves.add(tuple(learning_rate_at(step) for step in range(3 * steps)))
    assert len(curves) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_epochs": -1.0}, "schedule.warmup_epochs is -1.0: set it"),
        ({"warmup_epochs": math.inf}, "schedule.warmup_epochs is inf: set it"),
        ({"warmup_epochs": math.nan}, "schedule.warmup_epochs is nan: set it"),
        ({"min_fraction": 1.5}, "schedule.min_fraction is 1.5: set it between 0 and 1"),
        ({"power": -0.5}, "schedule.power is -0.5: set it"),
        ({"gamma": 10.0}, "schedule.gamma is 10.0: set it between 0 and 1"),
        ({"peak_fraction": 2.0}, "schedule.peak_fraction is 2.0: set it between 0 and 1"),
        ({"milestones": (30.0, 60.0)}, r"schedule.milestones is \(30.0, 60.0\): set it above 0"),
        ({"shape": "triangular", "warmup_epochs": 1.0}, "schedule.peak_fraction each set"),
        ({"shape": "triangular", "warmup_steps": 1}, "schedule.peak_fraction each set"),
        ({"warmup_epochs": 1.0, "warmup_steps": 1}, "schedule.warmup_steps .* use one of them"),
        ({"warmup_steps": -1}, "schedule.warmup_steps is -1: set it"),
        ({"shape": "cosine", "decay_at": 60}, r"with cosine: set ScheduleConfig\(shape=.trunk.\)"),
        ({"shape": "trunk", "decay_at": -1}, "schedule.decay_at is -1: set it"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**changes)


@pytest.mark.parametrize("decay_at", [9, 100, 101])
def test_a_trunk_that_decays_in_its_warmup_or_after_the_run_is_refused(decay_at: int) -> None:
    with pytest.raises(ConfigError, match=rf"decay_at is {decay_at}, .* from 10 to 99"):
        schedule(shape="trunk", warmup_epochs=1.0, decay_at=decay_at)
    # A run of no steps, which only evaluates, has no decay.
    assert schedule(shape="trunk", decay_at=decay_at, total_steps=0)(0) == 2.0


def test_until_its_decay_a_trunk_does_not_depend_on_its_length() -> None:
    whole = schedule(shape="trunk", warmup_epochs=1.0, total_steps=1000)
    for decay_at, total_steps in ((60, 61), (60, 100), (999, 1000)):
        ending = schedule(
            shape="trunk", warmup_epochs=1.0, decay_at=decay_at, total_steps=total_steps
        )
        assert [ending(step) for step in range(decay_at)] == [
            whole(step) for step in range(decay_at)
        ]


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    for length in ({"warmup_epochs": 11.0}, {"warmup_steps": 110}):
        with pytest.raises(ConfigError, match="the warmup has 110 steps, more than the 100 of"):
            schedule(**length)


def test_a_warmup_may_be_given_in_steps() -> None:
    in_steps, in_epochs = schedule(warmup_steps=15), schedule(warmup_epochs=1.5)
    assert [in_steps(step) for step in range(100)] == [in_epochs(step) for step in range(100)]
