"""Which state ends a run, in all its kinds, is in `test_rehearsal.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_trainer.checks.unsaved_state import mark_tensor, mark_unsaved
from accel_trainer.core.errors import listed
from accel_trainer.core.tensor_memory import sum_of_bits

SHARED = {"calls": 0}


class Part:
    """A user's part, with state of many kinds."""

    unsaved_attributes = ("cache",)
    num_made = 0

    def __init__(self) -> None:
        self.step = 0
        self.history = [1.0]
        self.random = random.Random(0)
        self.generator = torch.Generator()
        self.weight = torch.zeros(3)
        self.cache = 0


def changed(change: Callable[[Part], Any]) -> list[str]:
    part = Part()
    model = nn.Linear(2, 2)
    before = mark_unsaved({"task": part}, model=model)
    change(part)
    after = mark_unsaved({"task": part}, model=model)
    return [name for name in after if after[name] != before[name]]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda part: vars(part).update(step=1), "task.step"),
        (lambda part: part.history.append(2.0), "task.history"),
        (lambda part: part.random.random(), "task.random"),
        (lambda part: torch.rand(1, generator=part.generator), "task.generator"),
        (lambda part: part.weight[0].add_(1), "task.weight"),
    ],
)
def test_state_in_an_attribute_that_has_changed_is_found(
    change: Callable[[Part], Any], name: str
) -> None:
    assert changed(change) == [name]


@pytest.mark.parametrize(
    ("state", "use"),
    [
        (np.random.default_rng(0), lambda drawing: drawing.random()),
        (np.random.RandomState(0), lambda drawing: drawing.rand()),
    ],
)
def test_each_kind_of_generator_of_numpy_is_marked(state: Any, use: Callable[[Any], Any]) -> None:
    before = mark_unsaved({"task": state}, model=nn.Identity())
    assert mark_unsaved({"task": state}, model=nn.Identity()) == before
    use(state)
    assert mark_unsaved({"task": state}, model=nn.Identity()) != before


class Held:
    """What a list or a dict may hold."""

    def __init__(self) -> None:
        self.number = 0

    def use(self) -> None:
        self.number += 1


class OwnList(list[int]):
    """A list of the user's class."""


def stepped() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    return schedule


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: [Held()], lambda held: held[0].use()),
        (lambda: {"loss": Held()}, lambda held: held["loss"].use()),
        (lambda: (1, Held()), lambda held: held[1].use()),
        (lambda: [nn.Linear(2, 2)], lambda held: nn.init.ones_(held[0].weight)),
        (lambda: OwnList([1]), lambda held: held.append(2)),
        (lambda: [0.0] * 5000, lambda held: held.__setitem__(5, 1.0)),
        (lambda: dict.fromkeys(range(5000), 0.0), lambda held: held.update({5: 1.0})),
        (stepped, lambda held: held.step()),
    ],
)
def test_state_of_objects_that_others_hold_is_found(
    make: Callable[[], Any], use: Callable[[Any], Any]
) -> None:
    def marks() -> dict[str, Any]:
        return mark_unsaved({"task": part}, model=nn.Identity())

    part = Part()
    vars(part)["held"] = make()
    before = marks()
    assert marks() == before
    use(vars(part)["held"])
    after = marks()
    assert [name for name in after if after[name] != before[name]]


@pytest.mark.parametrize("number", [Decimal("0.1"), Fraction(1, 3), np.float32(2), 1j])
def test_each_kind_of_number_is_marked(number: Any) -> None:
    assert changed(lambda part: vars(part).update(step=number)) == ["task.step"]
    before = mark_unsaved({"task": number}, model=nn.Identity())
    assert mark_unsaved({"task": number + 1}, model=nn.Identity()) != before


def test_state_in_a_class_or_a_global_that_has_changed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert changed(lambda part: monkeypatch.setattr(Part, "num_made", 1)) == ["Part.num_made"]
    assert changed(lambda part: monkeypatch.setitem(SHARED, "calls", 1)) == [f"{__name__}.SHARED"]


def test_state_that_is_listed_as_unsaved_is_left_out() -> None:
    assert changed(lambda part: vars(part).update(cache=1)) == []


def test_state_of_the_model_that_a_checkpoint_holds_is_left_out() -> None:
    model = nn.BatchNorm1d(2)
    before = mark_unsaved({"model": model}, model=model)
    model(torch.randn(4, 2))
    with torch.no_grad():
        model.weight.add_(1)
    assert mark_unsaved({"model": model}, model=model) == before


def test_the_mark_of_a_tensor_shows_any_bit_of_a_large_one() -> None:
    large = torch.zeros(100_000)
    before = mark_tensor(large)
    assert mark_tensor(large.clone()) == before
    large[77_777] = torch.finfo(torch.float32).tiny
    assert mark_tensor(large) != before
    assert mark_tensor(torch.zeros(10, 10_000)) != before, "another shape"


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64]
)
def test_the_sum_of_bits_of_a_tensor_tells_zeros_nan_and_inf_apart(dtype: torch.dtype) -> None:
    ones = torch.ones(5).to(dtype)
    assert int(sum_of_bits(ones)) == int(sum_of_bits(ones.flip(0)))
    assert int(sum_of_bits(ones)) != int(sum_of_bits(ones[:4]))
    if dtype.is_floating_point:
        zeros = torch.zeros(1, dtype=dtype)
        assert int(sum_of_bits(zeros)) != int(sum_of_bits(-zeros))
        assert int(sum_of_bits(zeros + torch.nan)) != int(sum_of_bits(zeros + torch.inf))


def test_the_sum_of_bits_shows_two_changed_signs_of_float64() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    assert int(sum_of_bits(ones)) != int(sum_of_bits(ones * torch.tensor([-1, -1, 1, 1])))


def test_many_names_of_state_are_listed_as_five_and_a_count() -> None:
    assert listed("gfedcba") == "a, b, c, d, e and 2 more"
    assert listed("ba") == "a, b"
