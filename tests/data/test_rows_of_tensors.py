"""Samples of a TensorDataset are read as rows of its tensors: the same batches in fewer calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from accel_trainer.core.errors import DataError
from accel_trainer.core.rng import generator_states
from accel_trainer.data.workers import SampleReader

from ..test_growth import count_lines

CPU = torch.device("cpu")
SIZE = 600
BATCHES = ([3, 0, 599], [5, 605, 1205], [7], [], [*range(SIZE)])


class OneByOne(Dataset[Any]):
    """The same samples, read one by one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def made(kind: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SIZE, 3, 4, 4, generator=generator)
    if kind == "channels last":
        images = images.to(memory_format=torch.channels_last)
    dataset = TensorDataset(images, torch.arange(SIZE) % 7)
    if kind == "a part":
        return Subset(dataset, torch.randperm(SIZE, generator=generator).tolist())
    if kind == "numbers of 8 bits":
        numbers = torch.arange(1, 7, dtype=torch.uint8).repeat(SIZE // 6)
        few = TensorDataset(images[:8], torch.arange(8))  # which a number of 8 bits returns whole
        return Subset(few, numbers)  # type: ignore[arg-type]
    if kind == "a part of a part":
        return Subset(Subset(dataset, range(SIZE)), torch.arange(SIZE))  # type: ignore[arg-type]
    return dataset


def read(dataset: Any, num_workers: int) -> list[Any]:
    reader = SampleReader(dataset, CPU, seed=1, num_workers=num_workers)
    batches = reader.read(iter([torch.tensor(ids, dtype=torch.int64) for ids in BATCHES]), 2)
    found: list[Any] = []
    for batch in batches:
        tensors: list[Tensor] = [batch.sample_ids, batch.inputs, batch.targets]
        found.append([(each.tolist(), each.stride(), each.dtype) for each in tensors])
        if num_workers == 0:
            found.append(str(generator_states()))
    return found


@pytest.mark.parametrize(
    "kind", ["all", "a part", "numbers of 8 bits", "a part of a part", "channels last"]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_tensors_are_the_samples_one_by_one(kind: str, num_workers: int) -> None:
    """Also the generators are the same afterwards."""
    dataset = made(kind)
    assert read(dataset, num_workers) == read(OneByOne(dataset), num_workers)


def test_a_larger_batch_of_rows_takes_no_more_calls() -> None:
    reader = SampleReader(made("all"), CPU)

    def lines(size: int) -> int:
        return count_lines(lambda: [*reader.read(iter([torch.arange(size)]), 0)])

    lines(2)
    assert lines(512) - lines(128) < 5 * (512 - 128), "of Python, for each sample"


def test_a_row_that_is_missing_is_named() -> None:
    dataset = Subset(made("all"), [0, SIZE])
    with pytest.raises(DataError, match="sample 1 cannot be read"):
        [*SampleReader(dataset, CPU).read(iter([torch.tensor([0, 1])]), 0)]
