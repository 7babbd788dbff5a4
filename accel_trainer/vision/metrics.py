"""The metrics by which a classifier of images is evaluated."""

from __future__ import annotations

from ..core.types import Metric
from ..training.evaluation.metrics import ConfusionMatrix, MeanLoss, TopKAccuracy

_TOP_K = 5


def classification_metrics(num_classes: int) -> list[Metric]:
    """Return the mean loss, the accuracy and the confusion matrix for logits [B, num_classes].

    With more than 5 classes, also the top-5 accuracy, which is always 1 with fewer.
    """
    metrics: list[Metric] = [MeanLoss(), TopKAccuracy(), ConfusionMatrix(num_classes)]
    if num_classes > _TOP_K:
        metrics.insert(2, TopKAccuracy(_TOP_K))
    return metrics
