from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer.callbacks.evaluation_file import (
    EVALUATION_FILE,
    as_tensor_if_long,
    read_details,
    write_details,
)
from accel_trainer.core import filesystem
from accel_trainer.training.plain_values import is_detail


def test_details_of_an_evaluation_are_read_back_with_their_step(tmp_path: Path) -> None:
    results = {
        "eval/loss": 0.5,
        "eval/matrix": [[1, 2], [3, 4]],
        "eval/more": {"a": [1.5, None]},
        "eval/x": "text",
    }
    write_details(tmp_path, results, optimizer_step=7)
    details = {name: value for name, value in results.items() if is_detail(value)}
    assert read_details(tmp_path) == (7, details)
    assert list(details) == ["eval/matrix", "eval/more"]


def test_the_file_of_an_evaluation_is_that_of_the_last_one(tmp_path: Path) -> None:
    write_details(tmp_path, {"eval/matrix": [1]}, optimizer_step=1)
    write_details(tmp_path, {"eval/loss": 0.5}, optimizer_step=2)
    assert read_details(tmp_path) == (1, {"eval/matrix": [1]}), (
        "nothing to store, and nothing stored"
    )
    write_details(tmp_path, {"eval/matrix": [2]}, optimizer_step=3)
    assert read_details(tmp_path) == (3, {"eval/matrix": [2]})


def test_a_damaged_file_of_an_evaluation_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_details(tmp_path)
    write_details(tmp_path, {"eval/matrix": [1]}, optimizer_step=1)
    data = (tmp_path / EVALUATION_FILE).read_bytes()
    for damaged in (b"", data[:20], data.replace(b"optimizer_step", b"optimizer_stop")):
        (tmp_path / EVALUATION_FILE).write_bytes(damaged)
        with pytest.raises(ValueError, match="safetensors|damaged"):
            read_details(tmp_path)


def test_a_file_of_an_evaluation_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, chunks: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(filesystem, "replace_file", fail)
    with caplog.at_level(logging.WARNING):
        write_details(tmp_path, {"eval/matrix": [1]}, optimizer_step=1)
    assert f"{EVALUATION_FILE}: no space left" in caplog.text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, None] * 3_000, torch.tensor([0.5, float("nan")] * 3_000, dtype=torch.float64)),
        ([[1, 2]] * 3_000, torch.tensor([[1, 2]] * 3_000)),
    ],
)
def test_many_numbers_of_a_metric_are_stored_as_a_tensor(
    values: list[Any], expected: Tensor
) -> None:
    found = as_tensor_if_long(values)
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    "values", [[], [1] * 4_096, ["a"] * 5_000, [{"id": 1}] * 5_000, [[1], [1, 2]] * 3_000, "text"]
)
def test_what_is_not_many_numbers_is_stored_as_it_is(values: Any) -> None:
    assert as_tensor_if_long(values) is values
