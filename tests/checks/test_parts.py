from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accel_trainer import Batch, BatchPlan, Callback, ClassificationTask, MeanLoss, StepOutput
from accel_trainer.checks.parts import check_coupling, check_part, check_parts
from accel_trainer.core.errors import ConfigError


def test_parts_of_the_right_kind_are_accepted() -> None:
    check_part("model", nn.Linear(2, 2))
    check_part("task", ClassificationTask())
    check_parts("metrics", [MeanLoss()])
    check_parts("metrics", [])
    check_parts("callbacks", (Callback(),))
    check_parts("callbacks", iter([]))


class Pairs:
    """A task whose samples are coupled."""

    def __init__(self, couples_batch: object) -> None:
        self.couples_batch = couples_batch

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise NotImplementedError


class EvaluatedPairs(Pairs):
    """With an evaluation of each sample by itself."""

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise NotImplementedError


def plan(num_processes: int, per_device_batch_size: int, reduce: Any = "float") -> BatchPlan:
    """Return the plan of steps of 16 samples."""
    return BatchPlan(
        num_samples=64,
        global_batch_size=16,
        per_device_batch_size=per_device_batch_size,
        num_processes=num_processes,
        reduce=reduce,
    )


@pytest.mark.parametrize(
    ("task", "step"),
    [
        (ClassificationTask(), plan(2, 4)),
        (Pairs(False), plan(2, 4)),
        (EvaluatedPairs(True), plan(1, 16)),
        (EvaluatedPairs(True), plan(1, 16, "exact")),
        (EvaluatedPairs("gathered"), plan(2, 8)),
        (EvaluatedPairs("gathered"), plan(4, 4, "exact")),
    ],
)
def test_a_step_that_keeps_the_pairs_of_a_loss_is_accepted(task: Any, step: BatchPlan) -> None:
    check_coupling(task, step)


@pytest.mark.parametrize(
    ("task", "step", "said"),
    [
        (EvaluatedPairs(True), plan(2, 8), "has 2 processes x 1 micro-batch: set --accumulate 1"),
        (EvaluatedPairs(True), plan(1, 4), "has 1 process x 4 micro-batches: set --accumulate 1"),
        (EvaluatedPairs("gathered"), plan(2, 4), "has 2 processes x 2 micro-batches"),
        (EvaluatedPairs("gathered"), plan(2, 4, "exact"), "has 2 processes x 2 micro-batches"),
        (Pairs(True), plan(1, 16), "the loss of Pairs couples .*: add an eval_step whose losses"),
        (Pairs("gathered"), plan(1, 16), "the loss of Pairs couples .*: add an eval_step whose"),
        (Pairs("all"), plan(1, 16), "couples_batch of Pairs is 'all': set it to True, False or"),
        (Pairs(None), plan(1, 16), "couples_batch of Pairs is None: set it to True, False or"),
        (Pairs(1), plan(1, 16), "couples_batch of Pairs is 1: set it to True, False or"),
    ],
)
def test_a_step_that_splits_the_pairs_of_a_loss_is_one_line(
    task: Any, step: BatchPlan, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_coupling(task, step)
    assert "\n" not in str(caught.value)
