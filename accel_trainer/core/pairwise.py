"""Sums in a fixed order: neighbours are added in pairs, then the sums of pairs, and so on."""

from __future__ import annotations

import torch
from torch import Tensor


class PairwiseSum:
    """Adds up lists of tensors in pairs; the number of lists is a power of two.

    At most one partial sum is kept for each level of the binary tree.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[Tensor]]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Add the next list. Its tensors belong to the sum from now on, and may be overwritten."""
        level = 0
        while self._partial and self._partial[-1][0] == level:
            _, before = self._partial.pop()
            torch._foreach_add_(before, tensors)
            tensors = before
            level += 1
        self._partial.append((level, tensors))

    def total(self) -> list[Tensor]:
        """Return the sum of all lists."""
        ((_, tensors),) = self._partial
        return tensors


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum [...] of `rows` [N, ...], added up in pairs; N is a power of two."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]
