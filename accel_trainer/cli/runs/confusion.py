"""Which classes an evaluation confused, read from its results.

The results hold a matrix for few classes, and the pairs that occurred for many.

Shapes: K classes, M pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.types import Results


class Confusion(NamedTuple):
    """The confused classes, and the accuracy of each class.

    `pairs` is int64 [M, 3]: label, prediction and count. `accuracy` is float64 [K], NaN for a class
    without samples.
    """

    pairs: Tensor
    accuracy: Tensor

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.accuracy)

    def samples(self) -> list[int]:
        """Return the number of samples of each class."""
        return self._count(self.pairs[:, 0], self.pairs[:, 2])

    def predictions(self) -> list[int]:
        """Return how often each class was predicted."""
        return self._count(self.pairs[:, 1], self.pairs[:, 2])

    def hits(self) -> list[int]:
        """Return how many samples of each class were predicted right."""
        right = self.pairs[self.pairs[:, 0] == self.pairs[:, 1]]
        return self._count(right[:, 0], right[:, 2])

    def _count(self, classes: Tensor, counts: Tensor) -> list[int]:
        totals = torch.zeros(self.num_classes, dtype=torch.int64)
        return totals.index_add(0, classes, counts).tolist()

    def matrix(self) -> list[list[int]]:
        """Return the counts [K, K]; rows are labels, columns are predictions."""
        counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)
        counts[self.pairs[:, 0], self.pairs[:, 1]] = self.pairs[:, 2]
        return counts.tolist()


def read_confusion(metrics: Results, group: str = "") -> Confusion | None:
    """Return what `ConfusionMatrix` measured under names with the prefix `group`, if anything.

    Raises ValueError, TypeError or IndexError for values of another form.
    """
    accuracies = metrics.get(f"{group}per_class_accuracy")
    pairs = metrics.get(f"{group}confused_pairs")
    counts = metrics.get(f"{group}confusion_matrix")
    if accuracies is None or (pairs is None and counts is None):
        return None
    if isinstance(accuracies, list):
        accuracies = [float("nan") if each is None else each for each in accuracies]
    accuracy = torch.as_tensor(accuracies, dtype=torch.float64)
    if pairs is not None:
        return Confusion(torch.as_tensor(pairs, dtype=torch.int64).view(-1, 3), accuracy)
    matrix = torch.as_tensor(counts, dtype=torch.int64).view(len(accuracy), len(accuracy))
    cells = matrix.nonzero()
    cell_counts = matrix[cells[:, 0], cells[:, 1]][:, None]
    return Confusion(torch.cat([cells, cell_counts], 1), accuracy)
