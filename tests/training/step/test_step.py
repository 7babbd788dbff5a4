"""The optimizer is stepped through torch's public interface: hooks and profilers see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from accel_trainer import Callback, Trainer

from ... import workload


def watch_by_pre_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return optimizer.register_step_pre_hook(lambda *unused: seen.append("step"))


def watch_by_post_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return optimizer.register_step_post_hook(lambda *unused: seen.append("step"))


def watch_by_global_pre_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return register_optimizer_step_pre_hook(lambda *unused: seen.append("step"))


def watch_by_global_post_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return register_optimizer_step_post_hook(lambda *unused: seen.append("step"))


@pytest.mark.parametrize(
    "watch",
    [watch_by_pre_hook, watch_by_post_hook, watch_by_global_pre_hook, watch_by_global_post_hook],
)
def test_hooks_see_each_step_of_a_run(
    tmp_path: Path, watch: Callable[[Optimizer, list[str]], RemovableHandle]
) -> None:
    seen: list[str] = []
    handles = []

    class Watch(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            handles.append(watch(trainer.optimizer, seen))

    result = workload.train(workload.make_config(tmp_path), callbacks=(Watch(),))
    handles[0].remove()
    assert len(seen) == result.position.optimizer_step == 10


def test_a_profiler_sees_each_step_of_a_run(tmp_path: Path) -> None:
    with torch.profiler.profile(acc_events=True) as profiler:
        result = workload.train(workload.make_config(tmp_path))
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["Optimizer.step#SGD.step"] == result.position.optimizer_step
