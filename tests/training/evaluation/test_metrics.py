from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, Metric, StepOutput
from accel_trainer.training.evaluation.metrics import (
    ConfusionMatrix,
    MeanLoss,
    MeanNumber,
    TopKAccuracy,
    sums_device,
)
from accel_trainer.training.plain_values import plain_values

from .. import planted
from ..planted import PlainTask

CPU = torch.device("cpu")
NUM_SAMPLES = 211


def make_samples(num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(NUM_SAMPLES, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (NUM_SAMPLES,), generator=generator)


def result_of(
    metric: Metric, logits: Tensor, labels: Tensor, *, num_parts: int = 3, batch_size: int = 10
) -> Any:
    """Compute as `num_parts` processes do: local sums, added up at the end; ids are unordered."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    if hasattr(metric, "for_samples"):
        metric = metric.for_samples(len(labels))
    parts = []
    for part in order.tensor_split(num_parts):
        sums = metric.empty(CPU)
        for ids in part.split(batch_size):
            losses = F.cross_entropy(logits[ids], labels[ids], reduction="none")
            metric.update(
                sums, Batch(logits[ids], labels[ids], ids), StepOutput(losses, logits[ids])
            )
        parts.append(sums)
    return plain_values(metric.compute(torch.stack(parts).sum(0)))


@pytest.mark.parametrize("num_classes", [2, 4, 5, 11])
def test_metrics_equal_those_of_scikit_learn(num_classes: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = make_samples(num_classes)
    predictions = logits.argmax(1)
    probabilities = logits.double().softmax(1).numpy()
    loss = result_of(MeanLoss(), logits, labels)
    assert loss == {"loss": pytest.approx(metrics.log_loss(labels, probabilities), rel=1e-6)}
    accuracy = metrics.accuracy_score(labels, predictions)
    assert result_of(TopKAccuracy(), logits, labels) == {"accuracy": accuracy}
    if num_classes > 5:
        top5 = metrics.top_k_accuracy_score(labels, logits, k=5)
        assert result_of(TopKAccuracy(5), logits, labels) == {"top5_accuracy": top5}
    result = result_of(ConfusionMatrix(num_classes), logits, labels)
    assert result["confusion_matrix"] == metrics.confusion_matrix(labels, predictions).tolist()
    assert (
        result["per_class_accuracy"]
        == metrics.recall_score(labels, predictions, average=None).tolist()
    )


@pytest.mark.parametrize("num_classes", [2, 4, 5])
def test_top_5_of_at_most_5_classes_is_every_sample(num_classes: int) -> None:
    logits, labels = make_samples(num_classes)
    assert result_of(TopKAccuracy(5), logits, labels) == {"top5_accuracy": 1.0}


def test_a_tie_is_a_hit_of_the_lowest_class_as_in_numpy() -> None:
    logits = torch.zeros(4, 3)
    labels = torch.tensor([0, 1, 2, 0])
    expected = float((np.argmax(logits.numpy(), 1) == labels.numpy()).mean())
    assert result_of(TopKAccuracy(), logits, labels) == {"accuracy": expected}
    assert result_of(ConfusionMatrix(3), logits, labels)["per_class_accuracy"] == [1.0, 0.0, 0.0]


def test_a_class_without_samples_has_no_accuracy() -> None:
    result = result_of(ConfusionMatrix(3), torch.eye(3)[[0, 0, 2]], torch.tensor([0, 0, 0]))
    assert result == {
        "confusion_matrix": [[2, 0, 1], [0, 0, 0], [0, 0, 0]],
        "per_class_accuracy": [2 / 3, None, None],
    }


def test_more_logits_than_classes_of_a_confusion_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match="4 logits per sample, the confusion matrix has 3 classes"):
        result_of(ConfusionMatrix(3), torch.eye(4), torch.tensor([0, 1, 2, 2]))


def test_small_integers_are_labels_too() -> None:
    logits, labels = make_samples(200)
    for metric in (TopKAccuracy(), ConfusionMatrix(200)):
        expected = result_of(metric, logits, labels)
        assert result_of(metric, logits, labels.to(torch.uint8)) == expected, (
            "200 * 200 is no uint8"
        )


PER_PIXEL = (torch.zeros(8, 3, 4, 4), torch.zeros(8, 4, 4, dtype=torch.int64))
LOGITS, LABELS = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "labels", "said"),
    [
        (
            *PER_PIXEL,
            r"returns float32 \[8, 3, 4, 4\] for targets int64 \[8, 4, 4\]: "
            r"a classifier returns logits",
        ),
        (LOGITS[:, :1], LABELS, r"float32 \[8, 1\] .*: the cross-entropy of one class is always 0"),
        (LOGITS, LABELS[:, None], r"targets int64 \[8, 1\]: give labels \[B\],"),
        (LOGITS, LOGITS, r"targets float32 \[8, 3\]: give labels int64 \[B\]$"),
        (LOGITS, LABELS.float(), r"targets float32 \[8\]: give labels int64 \[B\],"),
        (LOGITS, LABELS[:4], r"targets int64 \[4\]: give each sample one target"),
        ((LOGITS, LOGITS), LABELS, r"returns an object of type tuple for targets int64 \[8\]"),
    ],
)
@pytest.mark.parametrize(
    "metric",
    [TopKAccuracy(), TopKAccuracy(2), ConfusionMatrix(3, num_samples=8)],
)
def test_a_metric_refuses_other_shapes_than_logits_and_labels(
    metric: Metric, logits: Any, labels: Tensor, said: str
) -> None:
    batch = Batch(None, labels, torch.arange(8))
    output = StepOutput(torch.zeros(8), logits)
    with pytest.raises(ConfigError, match=said):
        metric.update(metric.empty(CPU), batch, output)


@pytest.mark.parametrize("is_mean", [False, True])
def test_the_mean_loss_is_over_samples_or_items(is_mean: bool) -> None:
    first = torch.tensor([1.0, 5.0]), torch.tensor([3, 0])
    second = torch.tensor([7.0]), torch.tensor([1])
    metric = MeanLoss()
    by_sample, by_item = metric.empty(CPU), metric.empty(CPU)
    for losses, num_items in (first, second):
        batch = Batch(None, None, torch.arange(len(losses)))
        outputs = [StepOutput(losses), StepOutput(losses, num_items=num_items)]
        if is_mean:
            outputs = [
                StepOutput.from_mean(losses.mean(), num_items=len(losses)),
                StepOutput.from_mean(losses.sum() / num_items.sum(), num_items=num_items.sum()),
            ]
        metric.update(by_sample, batch, outputs[0])
        metric.update(by_item, batch, outputs[1])
    assert metric.compute(by_sample) == {"loss": 13 / 3}
    assert metric.compute(by_item) == {"loss": 13 / 4}


def test_a_number_of_the_task_is_averaged_over_samples_or_items() -> None:
    metric = MeanNumber("hits")
    by_sample, by_item = metric.empty(CPU), metric.empty(CPU)
    for hits, num_items in (([True, False], [3, 0]), ([True], [1])):
        batch = Batch(None, None, torch.arange(len(hits)))
        output = StepOutput(torch.zeros(len(hits)), numbers={"hits": torch.tensor(hits)})
        metric.update(by_sample, batch, output)
        metric.update(by_item, batch, output._replace(num_items=torch.tensor(num_items)))
    assert metric.compute(by_sample) == {"hits": 2 / 3}
    assert metric.compute(by_item) == {"hits": 2 / 4}


def test_a_number_with_a_direction_can_select_the_best_checkpoint() -> None:
    assert MeanNumber("error").higher_is_better == {}
    assert MeanNumber("error", False).higher_is_better == {"error": False}
    assert MeanNumber("hits", higher_is_better=True).higher_is_better == {"hits": True}


@pytest.mark.parametrize(
    ("numbers", "found"), [({}, "no numbers"), ({"hit": torch.ones(2)}, "the numbers hit")]
)
def test_a_number_that_the_task_does_not_return_is_one_line(
    numbers: dict[str, Tensor], found: str
) -> None:
    metric = MeanNumber("hits")
    output = StepOutput(torch.zeros(2), numbers=numbers)
    said = rf"METRIC.* returned {found} in evaluation: return StepOutput\(.*numbers=.*'hits'"
    with pytest.raises(ConfigError, match=said) as caught:
        metric.update(metric.empty(CPU), Batch(None, None, torch.arange(2)), output)
    assert "\n" not in str(caught.value)


class Hits(PlainTask):
    """Says which predictions are right."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(numbers={"hits": output.outputs.argmax(1) == batch.targets})

    eval_step = step


def test_a_number_is_reported_in_training_and_in_evaluation(tmp_path: Path) -> None:
    metrics = (TopKAccuracy(), MeanNumber("hits", higher_is_better=True))
    result = planted.train(planted.make_config(tmp_path), task=Hits, metrics=metrics)
    assert result.metrics["eval/hits"] == result.metrics["eval/accuracy"] > 0
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    hits = [row["train/hits"] for row in rows if row["event"] == "train"]
    assert hits
    assert all(0 <= each <= 1 for each in hits)


def test_metrics_say_which_numbers_can_select_the_best_checkpoint() -> None:
    logits, labels = make_samples(7)
    directions = {}
    for metric in (MeanLoss(), TopKAccuracy(), TopKAccuracy(5), ConfusionMatrix(7)):
        assert metric.higher_is_better.keys() <= result_of(metric, logits, labels).keys()
        directions.update(metric.higher_is_better)
    assert directions == {"loss": False, "accuracy": True, "top5_accuracy": True}


def test_sums_lie_on_the_device_unless_it_has_no_float64() -> None:
    """Apple's GPUs have none; where there is no such GPU, there is none of its float64 either."""
    assert sums_device(CPU) == CPU
    assert sums_device(torch.device("mps")) == CPU


@pytest.mark.parametrize(
    "metric", [MeanLoss(), TopKAccuracy(), TopKAccuracy(3), ConfusionMatrix(4)]
)
def test_metrics_do_not_depend_on_parts_and_batches(metric: Metric) -> None:
    logits, labels = make_samples(4)
    whole = result_of(metric, logits, labels, num_parts=1, batch_size=NUM_SAMPLES)
    for num_parts, batch_size in ((1, 1), (2, 7), (4, 100)):
        split = result_of(metric, logits, labels, num_parts=num_parts, batch_size=batch_size)
        assert split == pytest.approx(whole, rel=1e-12) if "loss" in whole else split == whole
