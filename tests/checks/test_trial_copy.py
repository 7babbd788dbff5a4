from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer.checks.trial_copy import trial_copy


class Part:
    """A user's part with attributes of many kinds."""

    def __init__(self) -> None:
        self.step = 0
        self.history = [1]
        self.names = {"a": 1}
        self.last = deque([1], maxlen=3)
        self.weight = torch.ones(2)


def test_a_trial_changes_no_attribute_of_the_part() -> None:
    part = Part()
    tried = trial_copy(part)
    tried.step = 7
    tried.history.append(2)
    tried.names["b"] = 2
    tried.last.append(2)
    assert (part.step, part.history, part.names, list(part.last)) == (0, [1], {"a": 1}, [1])


def test_a_trial_shares_the_tensors_of_the_part() -> None:
    part = Part()
    assert trial_copy(part).weight is part.weight


def test_a_trial_may_replace_the_buffers_of_a_module() -> None:
    norm = nn.BatchNorm1d(2)
    before = norm.running_mean
    trial_copy(norm).running_mean = torch.ones(2)
    assert norm.running_mean is before


class Uncopied:
    """A part that refuses to be copied."""

    def __copy__(self) -> Uncopied:
        raise ValueError("there is only one")


@pytest.mark.parametrize("part", [Part, torch, print, 3, Uncopied()])
def test_a_part_that_has_no_copy_is_tried_itself(part: Any) -> None:
    assert trial_copy(part) is part
