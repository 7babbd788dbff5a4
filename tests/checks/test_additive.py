"""A metric whose sums do not add up over batches is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer.checks.additive import check_additive
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, StepOutput

Add = Callable[[Tensor, Tensor, Tensor], None]


class Own:
    """A metric of two numbers, of the losses [B] and the outputs [B, K]."""

    higher_is_better: dict[str, bool] = {}  # noqa: RUF012

    def __init__(self, add: Add) -> None:
        self._add = add

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        self._add(sums, output.losses.double(), output.outputs)

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {}


def total(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums += torch.stack([losses.sum(), losses.new_tensor(len(losses))])


def total_in_floats(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += losses.float().mean() * len(losses) + 1e6 * len(losses)


def squares(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += outputs.square().sum()


def random_share(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += (losses * torch.rand(len(losses))).sum()


def of_many(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    if len(losses) < 16:
        raise ValueError("too few samples")
    sums[0] += losses.max()


def not_a_number(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += (losses - losses).sum() / 0


def infinite(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums += torch.stack([(losses / 0).sum(), losses.sum()])


def maximum(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] = torch.maximum(sums[0], losses.max())


def mean_of_means(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums += torch.stack([losses.mean(), losses.new_ones(())])


def last(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] = losses[-1]


def decays(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums *= 0.9
    sums[0] += losses.sum()


def of_pairs(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += torch.pdist(outputs).sum()


def root(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] += losses.square().sum().sqrt()


HONEST = (total, total_in_floats, squares, random_share, of_many, not_a_number, infinite)
AT_ONCE = (mean_of_means, of_pairs, root)  # which one sample does not show
WRONG = (maximum, last, decays, *AT_ONCE)


def tried(add: Add, size: int, outputs: Any = None, num_items: Tensor | None = None) -> None:
    generator = torch.Generator().manual_seed(size)
    losses = torch.rand(size, generator=generator) + 0.1
    if outputs is None:
        outputs = torch.randn(size, 3, generator=generator)
    batch = Batch(outputs, torch.arange(size), torch.arange(size))
    check_additive(Own(add), [batch], StepOutput(losses, outputs, num_items))


@pytest.mark.parametrize("add", [*HONEST, *WRONG])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 31])
def test_only_sums_that_do_not_add_up_are_refused(add: Add, size: int) -> None:
    is_wrong = add in WRONG and not (add in AT_ONCE and size == 1)
    with pytest.raises(ConfigError, match="METRIC") if is_wrong else nullcontext():
        tried(add, size)


def overwrites(sums: Tensor, losses: Tensor, outputs: Tensor) -> None:
    sums[0] = losses.sum()


@pytest.mark.parametrize("size", [1, 2, 31])
def test_sums_that_the_next_batch_overwrites_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="METRIC"):
        tried(overwrites, size)


@pytest.mark.parametrize("add", [*HONEST, *WRONG])
def test_nothing_is_said_of_what_cannot_be_split(add: Add) -> None:
    tried(add, 4, outputs=torch.randn(7, 3))
    tried(add, 4, num_items=torch.zeros(4))
