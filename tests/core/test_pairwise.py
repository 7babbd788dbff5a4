from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_trainer.core.pairwise import PairwiseSum, sum_rows


def values(number: int) -> Tensor:
    """Float32 numbers of many magnitudes: another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, 5, generator=generator) * 10 ** torch.randint(
        -6, 6, (number, 5), generator=generator
    )


def added(rows: Tensor) -> Tensor:
    pairwise = PairwiseSum()
    for row in rows:
        pairwise.add([row.clone()])
    (total,) = pairwise.total()
    return total


def test_a_pairwise_sum_adds_neighbours_first() -> None:
    a, b, c, d = values(4)
    assert torch.equal(added(values(4)), (a + b) + (c + d))
    assert torch.equal(sum_rows(values(4)), (a + b) + (c + d))


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8, 16])
def test_a_pairwise_sum_of_partial_sums_has_the_bits_of_the_whole(num_processes: int) -> None:
    rows = values(16)
    partial = [added(part) for part in rows.chunk(num_processes)]
    assert torch.equal(sum_rows(torch.stack(partial)), sum_rows(rows))
    assert not torch.equal(rows.cumsum(0)[-1], sum_rows(rows)), "these numbers do show the order"


def test_a_pairwise_sum_keeps_a_list_of_tensors_for_each_level() -> None:
    pairwise = PairwiseSum()
    for index in range(7):
        pairwise.add([torch.full((2,), float(index)), torch.ones(())])
    assert len(pairwise._partial) == 3  # of 4, of 2 and of 1
    pairwise.add([torch.full((2,), 7.0), torch.ones(())])
    first, second = pairwise.total()
    assert (first.tolist(), float(second)) == ([28, 28], 8)
