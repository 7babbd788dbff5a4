"""A step of torch's optimizers leaves out what only a profile and hooks need, without either."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile

from accel_trainer.training.step.plain_step import take_step


class Noted(SGD):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        self.notes.append("own step")
        return super().step()


def built(kind: type[SGD] = SGD) -> Any:
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    optimizer: Any = kind([parameter], lr=0.5)
    optimizer.notes = []
    return optimizer


def calls_of(optimizer: Any) -> int:
    """Return how many functions of torch's wrapper a step calls."""
    names = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    take_step(optimizer)
    sys.setprofile(None)
    return names.count("_optimizer_step_code")


@pytest.mark.parametrize("kind", [SGD, Noted])
def test_a_step_takes_place_without_the_wrapper(kind: type[SGD]) -> None:
    optimizer = built(kind)
    assert calls_of(optimizer) == (kind is Noted)  # by its own call of super().step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.5, 0.5]
    assert optimizer.notes == ["own step"] * (kind is Noted)


def hooked_before(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: optimizer.notes.append("seen"))


def hooked_after(optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: optimizer.notes.append("seen"))


def assigned(optimizer: Any) -> None:
    optimizer.step = counted(optimizer.step)


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def counting(*arguments: Any) -> Any:
        result = step(*arguments)
        (arguments[0] if arguments else step.__self__).notes.append("seen")  # type: ignore[attr-defined]
        return result

    return counting


@pytest.mark.parametrize("observe", [hooked_before, hooked_after, assigned])
def test_who_observes_an_optimizer_sees_each_step(observe: Callable[[Any], None]) -> None:
    optimizer = built()
    observe(optimizer)
    take_step(optimizer)
    take_step(optimizer)
    assert optimizer.notes == ["seen"] * 2


def test_who_wraps_the_step_of_a_class_sees_each_step() -> None:
    class Own(SGD):
        pass

    optimizer = built(Own)
    Own.step = counted(Own.step)  # type: ignore[method-assign]
    take_step(optimizer)
    assert optimizer.notes == ["seen"]


@pytest.fixture
def seen() -> Iterator[list[Optimizer]]:
    found: list[Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: found.append(optimizer))
    yield found
    hook.remove()


def test_a_hook_of_all_optimizers_sees_each_step(seen: list[Optimizer]) -> None:
    optimizer = built()
    take_step(optimizer)
    assert seen == [optimizer]


def test_a_profile_names_the_step() -> None:
    optimizer = built()
    with profile() as profiled:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiled.key_averages()}
