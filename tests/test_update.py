"""A step leaves out what torch wraps around it, but where somebody looks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from accel_trainer import Callback, Trainer
from accel_trainer.update import take_step

from . import workload


def make_stepped(kind: type[Optimizer] = SGD) -> Optimizer:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return kind([weight], lr=0.1)  # type: ignore[call-arg]


class DecoratedSGD(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].zero_()


@contextmanager
def wrapper_forbidden() -> Iterator[None]:
    """Fail where torch's wrapper names the step for a profiler, as it does first."""

    def fail(name: str) -> None:
        raise AssertionError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "record_function", fail)
        yield


@pytest.mark.parametrize("kind", [SGD, AdamW, DecoratedSGD])
def test_a_step_without_torchs_wrapper_does_what_the_step_does(kind: type[Optimizer]) -> None:
    mine, theirs = make_stepped(kind), make_stepped(kind)
    theirs.step()
    with wrapper_forbidden():
        take_step(mine)
    assert torch.equal(mine.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0])


def test_a_step_that_is_not_wrapped_by_torch_is_taken_whole() -> None:
    make_stepped(SGD)  # whose step torch has wrapped from then on

    class WrappingSGD(SGD):
        @functools.wraps(SGD.step)  # takes over torch's mark that it is wrapped
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["params"][0].data.zero_()

    optimizer = make_stepped(WrappingSGD)
    take_step(optimizer)
    assert not optimizer.param_groups[0]["params"][0].any()


def test_a_step_replaced_by_a_scheduler_is_taken_so_that_it_counts() -> None:
    optimizer = make_stepped()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    take_step(optimizer)
    assert scheduler.optimizer._opt_called  # type: ignore[attr-defined]


def watch_by_pre_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return optimizer.register_step_pre_hook(lambda *unused: seen.append("step"))


def watch_by_post_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return optimizer.register_step_post_hook(lambda *unused: seen.append("step"))


def watch_by_global_pre_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return register_optimizer_step_pre_hook(lambda *unused: seen.append("step"))


def watch_by_global_post_hook(optimizer: Optimizer, seen: list[str]) -> RemovableHandle:
    return register_optimizer_step_post_hook(lambda *unused: seen.append("step"))


@pytest.mark.parametrize(
    "watch", [watch_by_pre_hook, watch_by_post_hook, watch_by_global_pre_hook, watch_by_global_post_hook]
)
def test_hooks_see_each_step_of_a_run(tmp_path: Path, watch: Callable[[Optimizer, list[str]], RemovableHandle]) -> None:
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
