from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.train_state import TrainState
from accel_trainer.core.types import Batch, StepBatch, StepOutput, Task, eval_step_of
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.training.step.nonfinite_report import NonfiniteReport
from accel_trainer.training.step.optimizer_step import OptimizerStep
from accel_trainer.training.strategy.data_parallel import DataParallelStrategy
from accel_trainer.training.tasks.task_output import check_output

LOSSES = torch.ones(4, requires_grad=True)
MEAN = LOSSES.mean()
COUNTS = torch.arange(4)


# --- checks ---


@pytest.mark.parametrize(
    "output",
    [
        StepOutput(LOSSES),
        StepOutput(LOSSES, torch.ones(4, 3), COUNTS, {"hits": COUNTS > 1}),
        StepOutput(LOSSES, {"logits": torch.ones(4, 3)}, numbers={}),
        StepOutput.from_mean(MEAN, num_items=4),
        StepOutput.from_mean(MEAN, num_items=COUNTS.sum(), outputs=torch.ones(4, 3)),
        StepOutput.from_mean(MEAN, num_items=4, numbers={"hits": COUNTS > 1}),
    ],
)
def test_losses_of_each_sample_and_declared_means_are_accepted(output: StepOutput) -> None:
    check_output(output, 4, has_graph=True)
    without_graph = output._replace(losses=output.losses.detach())
    check_output(without_graph, 4, has_graph=False)


PER_SAMPLE = r"return one for each sample, \[B\], as reduction='none' does, or, .*\.from_mean"
WRONG: dict[str, tuple[Any, str]] = {
    "a tensor": (LOSSES, r"TASK.* returned float32 \[4\]: return StepOutput\(losses\) of"),
    "None": (None, r"TASK.* returned an object of type NoneType: return StepOutput\(losses\) of"),
    "a tuple": (
        (LOSSES, None),
        r"TASK.* returned an object of type tuple: return StepOutput\(losses\) of",
    ),
    "no losses": (StepOutput(None), r"TASK.* of type NoneType: return losses as a tensor"),  # type: ignore[arg-type]
    "a float": (StepOutput(1.5), r"TASK.* of type float: return losses as a tensor: without item"),  # type: ignore[arg-type]
    "a mean of numpy": (
        StepOutput(np.ones(4)),  # type: ignore[arg-type]
        r"TASK.* of type ndarray: return losses as a tensor",
    ),
    "a mean that is a float": (
        StepOutput.from_mean(1.5, num_items=4),  # type: ignore[arg-type]
        r"TASK.* of type float: return losses as a tensor: without item",
    ),
    "no graph": (
        StepOutput(LOSSES.detach()),
        r"TASK.* float32 \[4\]: return losses with their graph: without detach",
    ),
    "a mean without a graph": (
        StepOutput.from_mean(MEAN.detach(), num_items=4),
        r"TASK.* float32 \[\]: return losses with their graph: without detach",
    ),
    "a scalar": (StepOutput(MEAN), rf"SHAPES.*losses are float32 \[\] for 4 .*: {PER_SAMPLE}"),
    "a column": (
        StepOutput(LOSSES[:, None]),
        rf"SHAPES.*losses are float32 \[4, 1\] for 4 samples: {PER_SAMPLE}",
    ),
    "one loss": (StepOutput(LOSSES[:1]), rf"SHAPES.*float32 \[1\] for 4 samples: {PER_SAMPLE}"),
    "too few losses": (StepOutput(LOSSES[:3]), rf"SHAPES.*float32 \[3\] for 4 .*: {PER_SAMPLE}"),
    "an int as items": (
        StepOutput(LOSSES, num_items=4),  # type: ignore[arg-type]
        r"SHAPES.*num_items are an object of type int for 4 samples: return a tensor with the",
    ),
    "items of numpy": (
        StepOutput(LOSSES, num_items=np.ones(4)),  # type: ignore[arg-type]
        r"SHAPES.*num_items are an object of type ndarray for 4 samples: return a tensor",
    ),
    "a sum of items": (
        StepOutput(LOSSES, num_items=COUNTS.sum()),
        r"SHAPES.*num_items are int64 \[\] for 4 samples: return a tensor .* of each sample",
    ),
    "a mean of each sample": (
        StepOutput.from_mean(LOSSES, num_items=4),
        r"SHAPES.*from_mean made a loss float32 \[4\] and .*: give the mean loss \[\]",
    ),
    "a mean with the items of each sample": (
        StepOutput.from_mean(MEAN, num_items=COUNTS),
        r"SHAPES.*from_mean made .* and num_items int64 \[4\]: give .*, and one number",
    ),
    "a mean as a number of a mean": (
        StepOutput.from_mean(MEAN, num_items=4, numbers={"hits": MEAN}),
        r"SHAPES.*float32 \[\] as the number 'hits' of 4 samples: return a tensor with one for",
    ),
    "a list of numbers": (
        StepOutput(LOSSES, numbers=[COUNTS]),  # type: ignore[arg-type]
        r"TASK.* returned an object of type list: return the numbers as a dict",
    ),
    "a float as a number": (
        StepOutput(LOSSES, numbers={"hits": 0.5}),  # type: ignore[dict-item]
        r"SHAPES.*of type float as the number 'hits' of 4 samples: return a tensor with one",
    ),
    "a sum as a number": (
        StepOutput(LOSSES, numbers={"hits": COUNTS.sum()}),
        r"SHAPES.*int64 \[\] as the number 'hits' of 4 samples: return a tensor with one for",
    ),
}


@pytest.mark.parametrize(("output", "said"), WRONG.values(), ids=WRONG)
def test_an_output_that_no_step_can_use_is_one_line(output: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_output(output, 4, has_graph=True)
    assert "\n" not in str(caught.value)


def test_the_loss_of_one_sample_is_no_scalar() -> None:
    """A mean would else be found out only by a batch of two."""
    with pytest.raises(ConfigError, match=rf"float32 \[\] for 1 sample: {PER_SAMPLE}"):
        check_output(StepOutput(MEAN), 1, has_graph=True)


# --- steps ---


class Losses:
    """A classifier that returns the loss of each sample."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(F.cross_entropy(model(batch.inputs), batch.targets, reduction="none"))


class Mean:
    """The same classifier, of which only the mean is known."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        return StepOutput.from_mean(loss, num_items=len(batch))


class TokenLosses:
    """Tokens without padding (0)."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs).unflatten(1, (3, 4)).mT[:, :, :3]
        losses = F.cross_entropy(logits, batch.targets, ignore_index=0, reduction="none")
        return StepOutput(losses.sum(1), num_items=(batch.targets != 0).sum(1))


class TokenMean:
    """The mean over these tokens."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs).unflatten(1, (3, 4)).mT[:, :, :3]
        loss = F.cross_entropy(logits, batch.targets, ignore_index=0)
        return StepOutput.from_mean(loss, num_items=(batch.targets != 0).sum())


LABELS = torch.randint(12, (7,), generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[1, 3, 0], [2, 0, 0], [0, 0, 0], [3, 3, 1], [0, 1, 0], [0, 0, 0], [2, 2, 2]])


def make_step(task: Task, model: nn.Module) -> OptimizerStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = DataParallelStrategy(Accelerator(cpu=True), seed=0)
    return OptimizerStep(
        strategy,
        task=task,
        model=model,
        wrapped_model=model,
        optimizers={"": optimizer},
        nonfinite=NonfiniteReport(strategy, may_skip=False, model=model, task=task, folder=Path()),
        activity=Activity(),
        max_grad_norm=None,
        max_grad_value=None,
        check_every_n_steps=None,
    )


def step_of(
    task: Task, targets: Tensor, parts: list[range], dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, float, float]:
    """Take a step over 7 samples; return the new model, and the mean of the loss from the sums."""
    torch.manual_seed(0)
    model = nn.Linear(5, 12).to(dtype)
    inputs = torch.randn(7, 5, dtype=torch.float64).to(dtype)
    step = make_step(task, model)
    batches = [Batch(inputs[ids], targets[ids], torch.tensor([*ids])) for ids in parts]
    gradients = step.compute_gradients(StepBatch(batches, 7), None)
    step.apply_gradients(TrainState(), gradients)
    sums = gradients.sums
    return model, float(sums.loss), 7 if sums.num_items is None else float(sums.num_items)


@pytest.mark.parametrize(
    "parts", [[range(7)], [range(5), range(5, 7)], [range(5), range(5, 6), range(6, 7)]]
)
@pytest.mark.parametrize(
    ("losses", "mean", "targets"), [(Losses, Mean, LABELS), (TokenLosses, TokenMean, TOKENS)]
)
def test_a_mean_has_the_gradients_of_the_losses(
    losses: type[Any], mean: type[Any], targets: Tensor, parts: list[range]
) -> None:
    """Also in micro-batches of different sizes; one has no token."""
    expected, loss_sum, num_items = step_of(losses(), targets, [range(7)])
    for task in (losses(), mean()):
        model, *numbers = step_of(task, targets, parts)
        assert numbers == pytest.approx([loss_sum, num_items], abs=1e-14, rel=1e-14)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_items_of_a_mean_are_counted_exactly(dtype: torch.dtype) -> None:
    """Neither 257 in bfloat16 nor 100,000 in float16 is the number itself."""
    for num_items in (257, 100_000):
        loss = torch.tensor(1.5, dtype=dtype, requires_grad=True)
        output = StepOutput.from_mean(loss, num_items=num_items)
        assert output.num_items == num_items
        assert output.losses == 1.5 * num_items


@pytest.mark.parametrize("number", [-3.0, float("nan")])
def test_a_mean_over_less_than_nothing_is_refused(number: float) -> None:
    class Wrong:
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            loss = model(batch.inputs).mean()
            return StepOutput.from_mean(loss, num_items=torch.tensor(number))

    with pytest.raises(ConfigError, match=rf"NUM_ITEMS.*returned {number} as num_items: return a"):
        step_of(Wrong(), LABELS, [range(7)])


def test_the_outputs_are_gone_when_the_backward_begins() -> None:
    """Logits of a large vocabulary would take as much memory as the backward itself."""
    seen: list[bool] = []

    class Watched:
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            logits = model(batch.inputs)
            losses = F.cross_entropy(logits, batch.targets, reduction="none")
            reference = weakref.ref(logits)
            losses.register_hook(lambda _: seen.append(reference() is None))
            return StepOutput(losses, logits)

    step_of(Watched(), LABELS, [range(5), range(5, 7)])
    assert seen == [True, True]


# --- evaluation ---


def test_an_evaluation_calls_step_unless_there_is_an_eval_step() -> None:
    class Both(Losses):
        def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            return StepOutput(torch.zeros(len(batch)))

    task = Losses()
    assert eval_step_of(task) == task.step
    batch = Batch(torch.ones(2, 3), torch.ones(2), torch.arange(2))
    assert torch.equal(eval_step_of(Both())(nn.Linear(3, 3), batch).losses, torch.zeros(2))


def test_an_evaluation_output_needs_the_losses_as_a_tensor() -> None:
    check_output(StepOutput(torch.ones(3), torch.ones(3, 2)), 3, has_graph=False)
    for output in (StepOutput([1.0]), StepOutput(np.ones(1))):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"TASK.*: return losses as a tensor"):
            check_output(output, 1, has_graph=False)
