from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from accel_trainer.metrics import ConfusionMatrix, EvaluateMetric, MeanLoss, TopKAccuracy
from accel_trainer.types import Batch, EvalOutput, Metric

from . import processes
from .joined import joined_processes

CPU = torch.device("cpu")
NUM_SAMPLES = 211
LOCAL_METRIC = '''
import datasets
import evaluate
import numpy as np


class MacroRecall(evaluate.Metric):
    """The mean of the recalls of the classes, and the recalls themselves."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="recall", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, percent=False):
        predictions, references = np.asarray(predictions), np.asarray(references)
        recalls = np.array([(predictions[references == label] == label).mean() for label in np.unique(references)])
        return {"macro_recall": recalls.mean() * (100 if percent else 1), "recalls": recalls, "num": len(predictions)}
'''


def make_samples(num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(NUM_SAMPLES, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (NUM_SAMPLES,), generator=generator)


def result_of(metric: Metric, logits: Tensor, labels: Tensor, *, num_parts: int = 3, batch_size: int = 10) -> Any:
    """Compute as `num_parts` processes do: sums of their own, added up at the end; ids in no order."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    parts = []
    for part in order.tensor_split(num_parts):
        sums = metric.empty(CPU)
        for ids in part.split(batch_size):
            losses = F.cross_entropy(logits[ids], labels[ids], reduction="none")
            metric.update(sums, Batch(logits[ids], labels[ids], ids), EvalOutput(losses, logits[ids]))
        parts.append(sums)
    return metric.compute(torch.stack(parts).sum(0))


@pytest.mark.parametrize("num_classes", [2, 4, 5, 11])
def test_metrics_equal_those_of_scikit_learn(num_classes: int) -> None:
    from sklearn import metrics

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
    assert result["per_class_accuracy"] == metrics.recall_score(labels, predictions, average=None).tolist()


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


@pytest.mark.parametrize("metric", [MeanLoss(), TopKAccuracy(), TopKAccuracy(3), ConfusionMatrix(4)])
def test_metrics_do_not_depend_on_parts_and_batches(metric: Metric) -> None:
    logits, labels = make_samples(4)
    whole = result_of(metric, logits, labels, num_parts=1, batch_size=NUM_SAMPLES)
    for num_parts, batch_size in ((1, 1), (2, 7), (4, 100)):
        split = result_of(metric, logits, labels, num_parts=num_parts, batch_size=batch_size)
        assert split == pytest.approx(whole, rel=1e-12) if "loss" in whole else split == whole


def macro_recall(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    predictions, references = logits.argmax(1).numpy(), labels.numpy()
    recalls = [float((predictions[references == label] == label).mean()) for label in range(4)]
    return {
        "macro_recall": pytest.approx(100 * sum(recalls) / 4, rel=1e-12),
        "recalls": recalls,
        "num": NUM_SAMPLES,
    }


def load_local_metric(folder: Path) -> EvaluateMetric:
    import evaluate

    module = evaluate.load(str(folder / "macro_recall.py"), cache_dir=str(folder / "cache"))
    return EvaluateMetric(module, NUM_SAMPLES, {"percent": True})


def test_a_local_metric_of_evaluate_gets_every_prediction_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "macro_recall.py").write_text(LOCAL_METRIC)
    logits, labels = make_samples(4)
    result = result_of(load_local_metric(tmp_path), logits, labels)
    assert result == macro_recall(logits, labels)
    assert [type(value) for value in result.values()] == [float, list, int]  # what a log can hold


def test_a_metric_of_evaluate_is_the_same_on_every_process(tmp_path: Path) -> None:
    (tmp_path / "macro_recall.py").write_text(LOCAL_METRIC)
    load_local_metric(tmp_path)  # prepared once: the module is copied into the cache
    processes.run(compute_local_metric, tmp_path, num_processes=2, folder=tmp_path / "logs")


def compute_local_metric(folder: Path) -> None:
    with joined_processes() as accelerator:
        metric = load_local_metric(folder)
        logits, labels = make_samples(4)
        sums = metric.empty(CPU)
        ids = torch.arange(NUM_SAMPLES).tensor_split(2)[accelerator.process_index]
        losses = torch.zeros(len(ids))
        metric.update(sums, Batch(logits[ids], labels[ids], ids), EvalOutput(losses, logits[ids]))
        assert metric.compute(accelerator.reduce(sums, reduction="sum")) == macro_recall(logits, labels)
