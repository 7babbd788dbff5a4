"""Splits and folds: which part a sample is in follows from its name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from accel_trainer import ConfigError, fold, split

NAMES = [f"photos/{number:04}.jpg" for number in range(2000)]


def named(parts: tuple[Tensor, ...], names: list[Any]) -> list[set[Any]]:
    return [{names[place] for place in part.tolist()} for part in parts]


def test_the_parts_of_a_split_have_each_sample_once() -> None:
    for ids in (2000, NAMES):
        parts = split(ids, (0.8, 0.15, 0.05))
        assert all(part.dtype == torch.int64 for part in parts)
        assert all(part.equal(part.sort().values) for part in parts)
        assert torch.cat(parts).sort().values.equal(torch.arange(2000))
        shares = [len(part) / 2000 for part in parts]
        assert shares == pytest.approx((0.8, 0.15, 0.05), abs=0.03)


def test_adding_samples_in_any_order_moves_no_other() -> None:
    before = named(split(NAMES[:1500], (0.7, 0.3)), NAMES[:1500])
    shuffled = [NAMES[place] for place in torch.randperm(2000).tolist()]
    after = named(split(shuffled, (0.7, 0.3)), shuffled)
    assert all(old < new for old, new in zip(before, after, strict=True))
    few, more = split(100, (0.5, 0.5)), split(200, (0.5, 0.5))
    assert all(old.equal(new[new < 100]) for old, new in zip(few, more, strict=True))


def test_samples_of_the_same_name_stay_together() -> None:
    patients = [f"patient {number % 90}" for number in range(1000)]
    training, test = named(split(patients, (0.5, 0.5)), patients)
    assert len(training | test) == 90
    assert not training & test
    for number in range(5):
        training, validation = named(fold(patients, 5, number), patients)
        assert not training & validation


def test_a_split_is_the_same_on_every_machine_and_depends_on_the_seed() -> None:
    assert split(12, (0.5, 0.5))[1].tolist() == [0, 3, 8, 9, 11]
    first, _ = split(NAMES, (0.5, 0.5))
    other, _ = split(NAMES, (0.5, 0.5), seed=1)
    shared = len(set(first.tolist()) & set(other.tolist()))
    assert 400 < shared < 600


def test_names_may_be_texts_numbers_paths_or_an_array() -> None:
    numbers = split(50, (0.5, 0.5))
    for ids in (list(range(50)), np.arange(50), torch.arange(50), [str(n) for n in range(50)]):
        assert all(a.equal(b) for a, b in zip(split(ids, (0.5, 0.5)), numbers, strict=True))
    paths = split([Path(name) for name in NAMES], (0.5, 0.5))
    assert all(a.equal(b) for a, b in zip(paths, split(NAMES, (0.5, 0.5)), strict=True))
    assert [len(part) for part in split([], (0.5, 0.5))] == [0, 0]


def test_each_sample_is_for_validation_in_one_fold() -> None:
    folds = [fold(NAMES, 5, number) for number in range(5)]
    for training, validation in folds:
        assert torch.cat([training, validation]).sort().values.equal(torch.arange(2000))
        assert 330 < len(validation) < 470
    together = torch.cat([validation for _, validation in folds])
    assert together.sort().values.equal(torch.arange(2000))


@pytest.mark.parametrize(
    "fractions", [(), 0.8, (0.8, 0.1), (0.8, 0.3), (1.2, -0.2), (1.0, 0.0), (float("nan"), 0.5)]
)
def test_fractions_that_cannot_split_are_one_line(fractions: Any) -> None:
    with pytest.raises(ConfigError, match="fractions=.*: give some above 0 that add up") as caught:
        split(10, fractions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("samples", [TensorDataset(torch.ones(4)), [{"text": "a"}] * 4])
def test_samples_in_place_of_names_are_one_line(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"split got samples: give len\(dataset\), or a name"):
        split(samples, (0.5, 0.5))


@pytest.mark.parametrize(("k", "number"), [(5, 5), (5, -1), (1, 0), (0, 0)])
def test_a_fold_that_does_not_exist_is_one_line(k: int, number: int) -> None:
    with pytest.raises(
        ConfigError, match=f"there is no fold {number} of {k}: give a number from 0 to k - 1"
    ):
        fold(10, k, number)
