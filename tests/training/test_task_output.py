from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import EvalOutput, StepOutput
from accel_trainer.training.task_output import check_eval_output, check_step_output

LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "output",
    [
        StepOutput(LOSS),
        StepOutput(LOSS, {"correct": torch.ones(())}, torch.tensor(7)),
        StepOutput(torch.ones(1, requires_grad=True), {"correct": torch.ones(1)}),
    ],
)
def test_a_step_output_of_single_numbers_is_accepted(output: StepOutput) -> None:
    check_step_output(output)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            LOSS,
            r"TASK.*the task returned float32 .*: "
            r"return StepOutput.loss_sum. of accel_trainer from train_step",
        ),
        (None, r"TASK.*: return StepOutput.loss_sum."),
        (StepOutput(LOSS.detach()), r"TASK.*: return loss_sum with its graph: without detach"),
        (StepOutput(1.5), r"TASK.*: return loss_sum with its graph"),  # type: ignore[arg-type]
        (
            StepOutput(torch.ones(4, requires_grad=True)),
            r"SHAPES.* as loss_sum: return one number, summed",
        ),
        (StepOutput(LOSS, [LOSS]), r"TASK.*: return the sums as a dict"),  # type: ignore[arg-type]
        (StepOutput(LOSS, {"correct": 3}), r"TASK.*: return the sum 'correct' as a tensor"),  # type: ignore[dict-item]
        (
            StepOutput(LOSS, {"correct": torch.ones(4)}),
            r"SHAPES.* as the sum correct: return one number",
        ),
        (StepOutput(LOSS, num_items=7), r"NUM_ITEMS.*: return the number as a tensor"),  # type: ignore[arg-type]
        (StepOutput(LOSS, num_items=torch.ones(4)), r"NUM_ITEMS.*: return the number as a tensor"),
    ],
)
def test_a_step_output_that_no_step_can_use_is_one_line(output: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_step_output(output)
    assert "\n" not in str(caught.value)


def test_an_evaluation_output_needs_the_losses_as_a_tensor() -> None:
    check_eval_output(EvalOutput(torch.ones(3), torch.ones(3, 2)))
    for output in (torch.ones(3), None, EvalOutput([1.0], torch.ones(1, 2))):  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=r"TASK.*: return EvalOutput.losses, outputs. of accel_trainer"
        ):
            check_eval_output(output)
