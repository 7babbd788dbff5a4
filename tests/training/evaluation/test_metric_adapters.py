from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, StepOutput
from accel_trainer.training.evaluation.metric_adapters import (
    TorchMetric,
    WholeSetMetric,
)
from accel_trainer.training.plain_values import plain_values

from ... import processes
from ...joined import joined_processes
from .test_metrics import CPU, NUM_SAMPLES, make_samples, result_of

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
'''  # noqa: E501


def macro_recall(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    predictions, references = logits.argmax(1).numpy(), labels.numpy()
    recalls = [float((predictions[references == label] == label).mean()) for label in range(4)]
    return {
        "macro_recall": pytest.approx(100 * sum(recalls) / 4, rel=1e-12),
        "recalls": recalls,
        "num": NUM_SAMPLES,
    }


def load_local_metric(folder: Path) -> WholeSetMetric:
    evaluate = pytest.importorskip("evaluate")
    module = evaluate.load(str(folder / "macro_recall.py"), cache_dir=str(folder / "cache"))

    def compute(logits: Tensor, labels: Tensor) -> Any:
        classes = logits.argmax(1).numpy()
        return module.compute(predictions=classes, references=labels.numpy(), percent=True)

    return WholeSetMetric(compute, num_outputs=4)


def test_a_metric_of_evaluate_gets_every_prediction_once_and_in_order(tmp_path: Path) -> None:
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
        metric = load_local_metric(folder).for_samples(NUM_SAMPLES)
        logits, labels = make_samples(4)
        sums = metric.empty(CPU)
        ids = torch.arange(NUM_SAMPLES).tensor_split(2)[accelerator.process_index]
        losses = torch.zeros(len(ids))
        metric.update(sums, Batch(logits[ids], labels[ids], ids), StepOutput(losses, logits[ids]))
        result = plain_values(metric.compute(accelerator.reduce(sums, reduction="sum")))
        assert result == macro_recall(logits, labels)


def torchmetrics_of(num_classes: int) -> dict[str, Any]:
    classification = pytest.importorskip("torchmetrics").classification

    return {
        "f1": classification.MulticlassF1Score(num_classes, average="macro"),
        "iou": classification.MulticlassJaccardIndex(num_classes),
        "auroc": classification.MulticlassAUROC(num_classes, thresholds=50),
        "precision": classification.MulticlassAveragePrecision(num_classes, thresholds=50),
    }


@pytest.mark.parametrize("name", ["f1", "iou", "auroc", "precision"])
def test_a_metric_of_torchmetrics_is_that_of_all_samples(name: str) -> None:
    logits, labels = make_samples(5)
    whole = torchmetrics_of(5)[name]
    whole.update(logits, labels)
    metric = TorchMetric(name, torchmetrics_of(5)[name])
    assert result_of(metric, logits, labels) == {
        name: pytest.approx(whole.compute().item(), abs=1e-7)
    }
    assert metric.higher_is_better == {name: True}


def test_the_metrics_of_a_collection_are_those_of_all_samples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    logits, labels = make_samples(5)
    whole, collection = (torchmetrics.MetricCollection(torchmetrics_of(5)) for _ in range(2))
    whole.update(logits, labels)
    expected = {
        f"photos_{name}": pytest.approx(value.item(), abs=1e-7)
        for name, value in whole.compute().items()
    }
    metric = TorchMetric("photos", collection)
    assert result_of(metric, logits, labels) == expected
    assert metric.higher_is_better == dict.fromkeys(expected, True)


def test_a_metric_of_torchmetrics_adds_up_over_joined_processes(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    processes.run(measure_in_parts, num_processes=2, folder=tmp_path)


def measure_in_parts() -> None:
    logits, labels = make_samples(5)
    metric = TorchMetric("f1", torchmetrics_of(5)["f1"])
    with joined_processes():
        ids = torch.arange(len(labels))
        rank = torch.distributed.get_rank()
        mine = metric.empty(CPU)
        part = ids[rank::2]
        metric.update(
            mine, Batch(None, labels[part], part), StepOutput(torch.zeros(len(part)), logits[part])
        )
        torch.distributed.all_reduce(mine)
        whole = torchmetrics_of(5)["f1"]
        whole.sync_on_compute = False
        whole.update(logits, labels)
        assert metric.compute(mine)["f1"].item() == pytest.approx(whole.compute().item(), abs=1e-7)


def test_a_metric_gets_the_kind_of_targets_that_it_needs() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kind, regression = torchmetrics.classification, torchmetrics.regression
    torch.manual_seed(0)
    logits, labels = torch.randn(NUM_SAMPLES, 3), torch.randint(2, (NUM_SAMPLES, 3))

    class OwnF1(kind.MultilabelF1Score):  # type: ignore[misc, name-defined]
        """A subclass in a module of the user's."""

    for build in (
        lambda: kind.MultilabelAUROC(3, thresholds=20),
        lambda: kind.MultilabelAveragePrecision(3, thresholds=20),
        lambda: OwnF1(3),
        lambda: kind.BinaryAveragePrecision(thresholds=20),
        lambda: kind.MulticlassF1Score(3),
        lambda: regression.MeanSquaredError(),
        lambda: regression.TweedieDevianceScore(2.0),  # fails with integers
        lambda: regression.R2Score(),
    ):
        outputs, targets = logits, labels.float()
        if isinstance(build(), kind.MulticlassF1Score):
            targets = labels.argmax(1)
        elif not isinstance(
            build(), kind.MultilabelAUROC | kind.MultilabelAveragePrecision | OwnF1
        ):
            outputs, targets = logits[:, 0], labels[:, 0].float()
        if isinstance(build(), regression.TweedieDevianceScore):
            outputs, targets = outputs.exp(), targets + 1
        whole = build()
        is_regression = type(whole).__module__.startswith("torchmetrics.regression")
        whole.update(outputs, targets if is_regression else targets.long())
        expected = whole.compute().item()
        result = result_of(TorchMetric("m", build()), outputs, targets)
        assert result == {"m": pytest.approx(expected, abs=1e-6)}, type(whole).__name__


def test_a_metric_that_cannot_use_the_targets_is_one_line() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kind = torchmetrics.classification
    logits = torch.randn(NUM_SAMPLES, 3)
    labels = torch.randint(2, (NUM_SAMPLES, 3)).float()
    several = torchmetrics.MetricCollection([kind.BinaryAccuracy(), kind.MultilabelF1Score(4)])
    for metric, targets in (
        (kind.MultilabelF1Score(4), labels),
        (kind.MultilabelF1Score(3), labels * 0.9),
        (kind.MulticlassF1Score(3), labels),
        (several, labels),
        (torchmetrics.regression.R2Score(multioutput="raw_values"), labels),
    ):
        name = type(metric).__name__.replace("MetricCollection", "MultilabelF1Score")
        with pytest.raises(ConfigError, match=rf"\[METRIC\]: {name} cannot use") as failed:
            result_of(TorchMetric("m", metric), logits, targets)
        assert "\n" not in str(failed.value)


def test_a_metric_that_keeps_every_prediction_is_refused() -> None:
    classification = pytest.importorskip("torchmetrics").classification
    with pytest.raises(ConfigError, match="MulticlassAUROC keeps preds, which is not a sum: pass"):
        TorchMetric("auroc", classification.MulticlassAUROC(5))


def test_a_metric_of_the_whole_set_gets_outputs_in_the_order_of_the_ids() -> None:
    roc_auc_score = pytest.importorskip("sklearn.metrics").roc_auc_score

    logits, labels = make_samples(5)

    def auroc(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        assert torch.equal(outputs.float(), logits)
        assert torch.equal(targets, labels)
        assert targets.dtype == torch.int64
        return {"auroc": roc_auc_score(targets, outputs.softmax(1), multi_class="ovr")}

    metric = WholeSetMetric(auroc, num_outputs=5, higher_is_better={"auroc": True})
    expected = roc_auc_score(labels, logits.double().softmax(1), multi_class="ovr")
    assert result_of(metric, logits, labels) == {"auroc": expected}


def test_a_metric_of_the_whole_set_knows_how_many_samples_there_are() -> None:
    metric = WholeSetMetric(lambda outputs, targets: {}, num_outputs=2)
    few = metric.for_samples(8)
    many = metric.for_samples(9)
    assert few.empty(CPU).shape == (8, 4)
    assert many.empty(CPU).shape == (9, 4)


def test_several_targets_of_a_sample_keep_their_values() -> None:
    outputs, targets = torch.randn(NUM_SAMPLES, 3), torch.randn(NUM_SAMPLES, 3)
    seen: list[Tensor] = []

    def keep(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        seen.extend((outputs.float(), targets.float()))
        return {}

    metric = WholeSetMetric(keep, num_outputs=3, num_targets=3).for_samples(NUM_SAMPLES)
    sums = metric.empty(CPU)
    for ids in torch.randperm(NUM_SAMPLES).split(50):
        metric.update(
            sums, Batch(None, targets[ids], ids), StepOutput(torch.zeros(len(ids)), outputs[ids])
        )
    metric.compute(sums)
    assert torch.equal(seen[0], outputs)
    assert torch.equal(seen[1], targets)


def test_another_number_of_outputs_is_named() -> None:
    logits, labels = make_samples(5)
    with pytest.raises(ConfigError, match="set num_outputs=5, num_targets=1"):
        result_of(WholeSetMetric(lambda outputs, targets: {}, num_outputs=4), logits, labels)


@pytest.mark.parametrize("function", [5, None, "auroc", {"auroc": 1}])
def test_a_metric_without_a_function_is_one_line(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"METRIC.*give WholeSetMetric\(function, num_outputs\)"):
        WholeSetMetric(function, num_outputs=lambda outputs, targets: {})  # type: ignore[arg-type]
