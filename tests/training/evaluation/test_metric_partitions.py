"""A metric of another library gives one number, however its samples are split into batches."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer import ClassificationTask, MultiLabelTask, TorchMetric
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, StepOutput, Task

NUM_SAMPLES = 40
NUM_CLASSES = 3
KINDS = ("Binary", "Multiclass", "Multilabel")
OPTIONS = {"num_classes": NUM_CLASSES, "num_labels": NUM_CLASSES, "thresholds": 20}
Arguments = Callable[[Batch, StepOutput], tuple[Any, ...]]


class Own:
    """A task whose outputs may be anything."""

    def step(self, model: object, batch: Batch) -> StepOutput:
        raise NotImplementedError


class Probabilities(ClassificationTask):
    """Evaluates other outputs than those of the task that it derives from."""

    def eval_step(self, model: Any, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        return output._replace(outputs=output.outputs.softmax(1))


def make(name: str) -> Any:
    """Return a metric of torchmetrics; None if it cannot be built from its usual options."""
    kind = getattr(pytest.importorskip("torchmetrics").classification, name)
    known = inspect.signature(kind.__init__).parameters
    try:
        metric = kind(**{key: value for key, value in OPTIONS.items() if key in known})
        TorchMetric("it", metric)
    except (TypeError, ValueError, ConfigError):
        return None
    return metric


def names_of(kind: str) -> list[str]:
    known = pytest.importorskip("torchmetrics").classification.__all__
    found = [each for each in sorted(known) if each.startswith(kind) and make(each) is not None]
    assert len(found) > 15
    return found


def samples(name: str) -> tuple[Tensor, Tensor]:
    """Return outputs of which most lie within 0..1, and the targets of a metric."""
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_SAMPLES,) if name.startswith("Binary") else (NUM_SAMPLES, NUM_CLASSES)
    outputs = torch.rand(shape, generator=generator) * 1.1
    high = 2 if name.startswith("Binary") else NUM_CLASSES
    targets = torch.randint(0, high, (NUM_SAMPLES,), generator=generator)
    if name.startswith("Multilabel"):
        targets = torch.randint(0, 2, shape, generator=generator)
    return outputs, targets


def arguments_of(name: str) -> Arguments | None:
    """Return the arguments of a metric of two classes: a slice of the logits [B, 2]."""
    if name.startswith("Binary"):
        return lambda batch, output: (output.outputs[:, 1], batch.targets)
    return None


def outputs_for(name: str, outputs: Tensor) -> Tensor:
    return torch.stack([-outputs, outputs], 1) if name.startswith("Binary") else outputs


def measure(name: str, task: Task, sizes: list[int], change: Callable[[Tensor], Tensor]) -> float:
    """Return the number of a metric over batches of these sizes, added up as processes do."""
    metric = TorchMetric("it", make(name), arguments_of(name)).for_task(task)
    outputs, targets = samples(name)
    order = torch.arange(NUM_SAMPLES).split(sizes)
    sums = [metric.empty(torch.device("cpu")) for _ in range(2)]
    for number, rows in enumerate(order):
        output = StepOutput(torch.zeros(len(rows)), outputs_for(name, change(outputs[rows])))
        metric.update(sums[number % 2], Batch(outputs[rows], targets[rows], rows), output)
    return number_of(metric.compute(sums[0] + sums[1])["it"])


def number_of(found: Any) -> float:
    """Return the sum of what a metric has computed, such as the points of a curve."""
    if isinstance(found, Tensor):
        return float(found.double().nansum())
    return sum(map(number_of, found))


def partitions() -> list[list[int]]:
    drawn = random.Random(0)
    found = [[NUM_SAMPLES], [1] * NUM_SAMPLES, [32, 8]]
    while len(found) < 8:
        cuts = sorted(drawn.sample(range(1, NUM_SAMPLES), drawn.randrange(1, 9)))
        ends = [0, *cuts, NUM_SAMPLES]
        found.append([end - start for start, end in zip(ends, ends[1:], strict=False)])
    return found


def right(name: str, change: Callable[[Tensor], Tensor]) -> float:
    """Return what torchmetrics computes from all probabilities at once."""
    metric = make(name)
    outputs, targets = samples(name)
    outputs = change(outputs)
    by_class = name.startswith("Multiclass")
    metric.update(outputs.softmax(1) if by_class else outputs.sigmoid(), targets)
    return number_of(metric.compute())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_task_are_logits_in_each_batch(kind: str) -> None:
    task = MultiLabelTask() if kind == "Multilabel" else ClassificationTask()
    for name in names_of(kind):
        for change in (torch.Tensor.clone, lambda outputs: outputs * 0.4):
            found = {round(measure(name, task, sizes, change), 6) for sizes in partitions()}
            assert found == {round(right(name, change), 6)}, name


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_unknown_kind_give_one_number_or_an_error(kind: str) -> None:
    for name in names_of(kind):
        found, errors = set(), set()
        for sizes in partitions():
            try:
                found.add(round(measure(name, Own(), sizes, torch.Tensor.clone), 6))
            except ConfigError as error:
                errors.add(error.code)
        assert found == {round(right(name, torch.Tensor.clone), 6)}, name
        assert errors <= {"METRIC"}


def test_the_error_is_of_metrics_that_depend_on_the_kind_alone() -> None:
    def fails(name: str) -> bool:
        try:
            measure(name, Own(), [1] * NUM_SAMPLES, torch.Tensor.clone)
        except ConfigError:
            return True
        return False

    assert fails("BinaryAccuracy")
    assert fails("MulticlassAUROC")
    assert not fails("MulticlassAccuracy")  # of the largest output, whatever it is


def test_probabilities_of_a_derived_task_stay_what_they_are() -> None:
    sizes = [NUM_SAMPLES]
    for task in (Own(), Probabilities()):
        found = measure("MulticlassAUROC", task, sizes, lambda outputs: outputs.softmax(1))
        assert found == pytest.approx(right("MulticlassAUROC", torch.Tensor.clone))
