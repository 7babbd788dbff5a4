"""Two records of the same step are compared row by row."""

from __future__ import annotations

from typing import Any

import pytest

from accel_trainer.lab.why.traces import (
    TraceDifference,
    attributes_that_differ,
    compare_data,
    compare_traces,
)


def operator(**given: Any) -> dict[str, Any]:
    """Return the row of an operator in a forward."""
    row = {"kind": "operator", "name": "aten.mul.Tensor", "phase": "forward", "module": "middle"}
    tensors = {"inputs": ["a", "b"], "plain": ["2"], "outputs": ["c"], "owned": [""]}
    return {**row, **tensors, "line": "net.py:5 in forward", **given}


def test_inputs_that_differ_come_before_outputs() -> None:
    found = compare_traces([operator()], [operator(inputs=["a", "x"], outputs=["y"])])
    assert found is not None
    assert (found.place, found.position) == ("inputs", 1)
    assert found.where() == "forward of middle"


def test_equal_inputs_and_other_outputs_are_the_operators_own() -> None:
    first = [operator(), operator(outputs=["d"])]
    found = compare_traces(first, [operator(), operator(outputs=["x"])])
    assert found is not None
    assert found.place == "outputs"
    assert found.rows[0] is first[1]


def test_a_number_from_python_is_shown_with_both_values() -> None:
    found = compare_traces([operator()], [operator(plain=["3"], outputs=["y"])])
    assert found is not None
    assert found.plain_values == ("2", "3")


def test_what_a_loader_does_as_it_starts_is_not_compared() -> None:
    starts = operator(name="aten.empty.memory_format", phase="data", line=None)
    assert compare_traces([starts, operator()], [operator()]) is None


def test_an_equal_sample_of_data_that_differ_elsewhere_is_equal() -> None:
    read = operator(phase="data", inputs=["all the data"])
    assert compare_traces([read], [{**read, "inputs": ["other data"]}]) is None


def test_an_update_names_the_weight_that_it_changes() -> None:
    update = operator(phase="update", module="", owned=["conv.weight"], line=None)
    found = compare_traces([update], [{**update, "outputs": ["x"]}])
    assert found is not None
    assert found.where() == "update of conv.weight"


@pytest.mark.parametrize(
    ("kind", "where"), [("state", "before its data"), ("gradient", "gradient")]
)
def test_the_place_of_a_state_or_a_gradient_does_not_repeat_its_name(kind: str, where: str) -> None:
    row = {"kind": kind, "name": "conv1.weight"}
    assert TraceDifference((row, row), "outputs", 0).where() == where


def test_attributes_and_samples_are_compared_by_their_names() -> None:
    def rows(count: str, sample: str) -> list[dict[str, Any]]:
        return [
            {"kind": "unsaved", "name": "model.count", "outputs": [count]},
            {"kind": "batch", "name": "the ids of the samples", "outputs": ["ids"]},
            {"kind": "batch", "name": "sample 3", "outputs": [sample]},
            {"kind": "sample", "name": "sample 3", "outputs": ["as read"]},
        ]

    one, other = rows("1", "x"), rows("2", "y")
    assert attributes_that_differ(one, other) == ["model.count"]
    data = compare_data(one, other)
    assert (data.has_other_ids, data.samples, data.was_read_apart) == (False, ["sample 3"], False)
