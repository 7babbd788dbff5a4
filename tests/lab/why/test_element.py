"""The first element in which two tensors differ, and by how many floats."""

from __future__ import annotations

import torch

from accel_trainer.lab.why.element import compare_tensors


def test_the_first_element_that_differs_is_found_in_logical_order() -> None:
    one = torch.zeros(2, 3).t()  # not contiguous
    other = one.clone()
    other[1, 0] = 1.0
    other[2, 1] = 1.0
    found = compare_tensors(one, other)
    assert found is not None
    assert found.index == (1, 0)
    assert found.text.startswith("2 of 6 elements differ, first [1, 0]: 0.0 and 1.0 (")


def test_neighbouring_floats_are_one_ulp_apart() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        one = torch.tensor([1.0, -1.0], dtype=dtype)
        other = torch.nextafter(one, torch.tensor([2.0, -1.0], dtype=dtype))
        found = compare_tensors(one, other)
        assert found is not None
        assert found.ulp == 1


def test_the_distance_over_zero_counts_the_floats_between() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal * 2**-23
    found = compare_tensors(torch.tensor([smallest]), torch.tensor([-smallest]))
    assert found is not None
    assert found.ulp == 2


def test_zeros_of_both_signs_differ_and_are_no_float_apart() -> None:
    found = compare_tensors(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert found is not None
    assert found.ulp == 0


def test_equal_nans_are_equal_and_an_integer_has_no_ulp() -> None:
    assert compare_tensors(torch.tensor([torch.nan]), torch.tensor([torch.nan])) is None
    found = compare_tensors(torch.tensor([1]), torch.tensor([2]))
    assert found is not None
    assert (found.values, found.ulp) == ((1, 2), None)
