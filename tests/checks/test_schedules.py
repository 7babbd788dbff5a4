from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LRScheduler

from accel_trainer import OptimizerConfig, ScheduleConfig, schedule_from_torch
from accel_trainer.checks.schedules import describe_misfit
from accel_trainer.optim.lr_scheduler import TorchSchedule

from ..training import planted


def judged(factory: Callable[[Optimizer], LRScheduler], num_steps: int) -> str | None:
    return describe_misfit(TorchSchedule(factory, learning_rate=0.1), num_steps=num_steps)


def test_a_scheduler_made_for_epochs_is_named_with_the_fix() -> None:
    for num_epochs in (1, 2, 3, 7, 10):
        num_steps = 48 * num_epochs
        found = judged(lambda o, t=num_epochs: lrs.CosineAnnealingLR(o, T_max=t), num_steps)
        assert found is not None, num_epochs
        assert re.search(rf"falls 2[34] times in {num_steps} steps", found)
    lambdas = [lambda e: 0.5 * (1 + math.cos(math.pi * e / 5)), lambda e: 0.6 + 0.4 * math.sin(e)]
    for each in lambdas:
        found = judged(lambda o, each=each: lrs.LambdaLR(o, each), 100)
        assert found is not None
        assert "rises and falls" in found
    fast = [
        lambda o: lrs.StepLR(o, 2),
        lambda o: lrs.MultiStepLR(o, range(2, 20)),
        lambda o: lrs.ExponentialLR(o, 0.5),
        lambda o: lrs.LambdaLR(o, lambda epoch: 0.7**epoch),
    ]
    for factory in fast:
        found = judged(factory, 96)
        assert found is not None
        assert "below a millionth of its peak in" in found


def one_cycle(optimizer: Optimizer, num_steps: int, *, three_phase: bool = False) -> LRScheduler:
    return lrs.OneCycleLR(
        optimizer, 0.1, total_steps=num_steps, three_phase=three_phase, cycle_momentum=False
    )


def test_a_scheduler_made_for_steps_and_restarts_are_fine() -> None:
    for num_steps in (1, 2, 10, 97):
        fine: list[Callable[[Optimizer], LRScheduler]] = [
            lambda o, n=num_steps: lrs.CosineAnnealingLR(o, T_max=n),
            lambda o, n=num_steps: one_cycle(o, n + 2),
            lambda o, n=num_steps: one_cycle(o, n + 2, three_phase=True),
            lambda o, n=num_steps: lrs.StepLR(o, max(1, n // 3)),
            lambda o, n=num_steps: lrs.PolynomialLR(o, n, power=2),
            lambda o, n=num_steps: lrs.LinearLR(o, 0.01, 1, total_iters=n),
            lambda o, n=num_steps: lrs.SequentialLR(
                o,
                [lrs.LinearLR(o, 0.01, 1, total_iters=n // 10 + 1), lrs.CosineAnnealingLR(o, n)],
                [n // 10 + 1],
            ),
            lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=2),
            lambda o: lrs.SequentialLR(
                o, [lrs.ConstantLR(o, 1), lrs.CosineAnnealingWarmRestarts(o, T_0=5)], [3]
            ),
            lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
            lambda o: lrs.LambdaLR(o, lambda step: 1 - step % 10 / 10),
            lambda o: lrs.ConstantLR(o, 1),
        ]
        for place, factory in enumerate(fine):
            assert judged(factory, num_steps) is None, (place, num_steps)


def test_a_run_warns_of_such_a_scheduler_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = planted.make_config(tmp_path)
    config = replace(config, optimizer=OptimizerConfig(), schedule=ScheduleConfig())
    config = replace(config, trainer=replace(config.trainer, max_steps=None))
    schedule = schedule_from_torch(lambda o: lrs.CosineAnnealingLR(o, T_max=2), learning_rate=0.1)
    planted.train(config, schedule=schedule)
    (line,) = [record.message for record in caplog.records if "[SCHEDULE]" in record.message]
    assert "rises and falls" in line
    assert "in 16 steps: set the lengths" in line


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_a_momentum_that_a_schedule_does_not_change_is_named(name: str) -> None:
    length = {"OneCycleLR": {"total_steps": 20}, "CyclicLR": {"base_lr": 0.01}}[name]
    for cycles in (True, False):
        found = judged(
            lambda o, cycles=cycles: getattr(lrs, name)(
                o, max_lr=0.1, cycle_momentum=cycles, **length
            ),
            20,
        )
        assert (found is not None and f"{name} also changes momentum" in found) is cycles
