"""The host knows the smallest and largest target of a batch that it has sent to a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer import Batch
from accel_trainer.core.extremes import extremes, note_extremes

from .. import processes


def sent(targets: Any) -> Any:
    return Batch(torch.zeros(3), targets, torch.arange(3)).to(torch.device("pretend")).targets


def follow_targets_to_a_device() -> None:
    labels = sent(torch.tensor([3, 0, 7]))
    assert extremes(labels) == (0, 7)
    labels[1] = -1
    assert extremes(labels) is None, "changed since"
    assert extremes(sent(torch.tensor([3, 0, 7])) + 1) is None, "made there"
    assert extremes(sent({"labels": torch.arange(3)})) is None
    assert extremes(sent(["a", "b", "c"])) is None


def test_the_ends_of_targets_are_known_on_a_device_until_they_change(tmp_path: Path) -> None:
    processes.run_on("pretend", follow_targets_to_a_device, folder=tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([2, 1], dtype=torch.uint8), (1, 2)),
        (torch.tensor([[0.5, -1.0]], requires_grad=True), (-1, 0.5)),
        (torch.tensor([True, False]), (0, 1)),
        (torch.tensor([]), None),
        (torch.tensor([1j]), None),
        (torch.eye(2).to_sparse(), None),
        (torch.zeros(1 << 19), None),
        (None, None),
    ],
    ids=str,
)
def test_the_ends_of_tensors_on_the_host_are_looked_up(values: Any, expected: Any) -> None:
    assert extremes(values) == expected


def test_nan_among_targets_fits_no_bounds() -> None:
    ends = extremes(torch.tensor([0.0, torch.nan]))
    assert ends is not None
    assert not any(-torch.inf < end < torch.inf for end in ends)


def test_tensors_that_do_not_count_their_changes_are_not_noted() -> None:
    with torch.inference_mode():
        values: Tensor = torch.zeros(1 << 19)
    note_extremes(values, (0, 0))
    assert extremes(values) is None
