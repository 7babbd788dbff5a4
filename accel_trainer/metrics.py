"""Metrics as monoids: float64 sums that add up over batches and processes, and numbers at the end.

Legend: B batch, K classes, N samples of the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .types import Batch, EvalOutput


@dataclass(frozen=True)
class MeanLoss:
    """The mean of the per-sample losses, as `loss`."""

    def empty(self, device: torch.device) -> Tensor:
        """Return sums [2]: the loss, the samples."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Add the losses [B]."""
        sums[0].add_(output.losses.sum(dtype=torch.float64))
        sums[1].add_(len(batch))

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return `loss`."""
        loss_sum, num_items = sums.tolist()
        return {"loss": loss_sum / num_items}


@dataclass(frozen=True)
class TopKAccuracy:
    """The fraction of samples whose label is among the `k` largest logits, as `accuracy` or `top<k>_accuracy`."""

    k: int = 1

    def empty(self, device: torch.device) -> Tensor:
        """Return sums [2]: the hits, the samples."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Add the hits of logits [B, K] against labels [B]."""
        if self.k == 1:
            hits = _predicted(output.outputs) == batch.targets
        else:
            k = min(self.k, output.outputs.shape[1])
            hits = (output.outputs.topk(k, dim=1).indices == batch.targets[:, None]).any(1)
        sums[0].add_(hits.sum())
        sums[1].add_(len(batch))

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return the accuracy in 0..1."""
        num_hits, num_items = sums.tolist()
        return {"accuracy" if self.k == 1 else f"top{self.k}_accuracy": num_hits / num_items}


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of (label, prediction), as `confusion_matrix` [K, K] and `per_class_accuracy` [K] (None: no sample)."""

    num_classes: int

    def empty(self, device: torch.device) -> Tensor:
        """Return counts [K, K]."""
        return torch.zeros(self.num_classes, self.num_classes, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Add the pairs of labels [B] and largest logits of [B, K]."""
        if output.outputs.shape[1] != self.num_classes:
            raise ValueError(
                f"{output.outputs.shape[1]} logits per sample, "
                f"the confusion matrix has {self.num_classes} classes: give both the same number"
            )
        cells = batch.targets * self.num_classes + _predicted(output.outputs)
        sums.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return the matrix, rows are labels, and the accuracy of each class."""
        counts = sums.long()
        per_class = [row[label] / sum(row) if sum(row) else None for label, row in enumerate(counts.tolist())]
        return {"confusion_matrix": counts.tolist(), "per_class_accuracy": per_class}


@dataclass(frozen=True)
class EvaluateMetric:
    """Any metric of the `evaluate` library over all predictions, exact for any number of processes.

    `metric` is what `evaluate.load` returned; a path to a local module works offline. Each process
    writes its predictions at the samples' ids of an array over all N samples, which the merge adds
    up: nothing is padded, gathered twice or out of order. Its `compute` runs on every process.
    """

    metric: Any
    num_samples: int
    compute_arguments: Mapping[str, Any] | None = None

    def empty(self, device: torch.device) -> Tensor:
        """Return [2, N]: predictions, labels."""
        return torch.zeros(2, self.num_samples, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        """Place the predicted classes of logits [B, K] and the labels [B] at their sample ids."""
        sums[0].index_add_(0, batch.sample_ids, _predicted(output.outputs).double())
        sums[1].index_add_(0, batch.sample_ids, batch.targets.double())

    def compute(self, sums: Tensor) -> dict[str, Any]:
        """Return what the metric computes, arrays and numbers of numpy as plain Python ones."""
        predictions, references = sums.long().numpy()
        arguments = dict(self.compute_arguments or {})
        result = self.metric.compute(predictions=predictions, references=references, **arguments)
        return {name: np.asarray(value).tolist() for name, value in result.items()}


def _predicted(logits: Tensor) -> Tensor:
    """Return the class of the largest logit of each row of [B, K], of equals the lowest, like argmax everywhere.

    Which is what `argmax` returns, in a quarter more time (20 us instead of 16 us for 500 x 10, CPU, torch 2.13).
    """
    return logits.max(1).indices
