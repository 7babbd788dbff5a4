"""The marks by which a change of state is seen."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_trainer.checks.unsaved_state import mark_tensor, mark_unsaved
from accel_trainer.core.errors import listed
from accel_trainer.core.tensor_memory import sum_of_bits

from .hidden import PLACES

MODEL = nn.Identity()


@pytest.mark.parametrize("place", [each for each in PLACES if each != "environment"])
def test_a_mark_shows_a_number_wherever_it_is_kept(place: str, tmp_path: Path) -> None:
    number = PLACES[place](tmp_path)
    before = mark_unsaved({"task": number}, model=MODEL)
    assert mark_unsaved({"task": number}, model=MODEL) == before
    number()
    assert mark_unsaved({"task": number}, model=MODEL) != before


@pytest.mark.parametrize("number", [Decimal("0.1"), Fraction(1, 3), np.float32(2), 1j])
def test_each_kind_of_number_is_marked(number: Any) -> None:
    before = mark_unsaved({"task": number}, model=MODEL)
    assert mark_unsaved({"task": number + 1}, model=MODEL) != before


class Logs:
    unsaved_attributes = ("cache",)
    cache = 0


def test_state_that_is_listed_as_unsaved_is_left_out() -> None:
    part = Logs()
    before = mark_unsaved({"task": part}, model=MODEL)
    part.cache = 1
    assert mark_unsaved({"task": part}, model=MODEL) == before


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
