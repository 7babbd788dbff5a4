"""Datasets, streams and samplers with a `set_epoch` are told the epoch that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from accel_trainer import (
    BatchConfig,
    RecipeConfig,
    RunConfig,
    StepOutput,
    StreamReader,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.types import Batch

NUM = 12


class Epochs(Dataset[Any]):
    """Samples that are the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return NUM

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.tensor([float(self.epoch), float(index)]), 0.0


class Shuffled(IterableDataset[Any]):
    """A stream in an order of its own for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, float]]:
        generator = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(NUM, generator=generator).tolist():
            yield torch.tensor([float(self.epoch), float(index)]), 0.0


class Recorder:
    """A task that keeps what it trains on."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if model.training:
            self.seen.append(batch.inputs)
        return StepOutput(model(batch.inputs).square().sum(1))


def sampled() -> Callable[[int], Any]:
    """Return a stream that a sampler of torch orders."""
    data = [(torch.tensor([0.0, float(index)]), 0.0) for index in range(NUM)]
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type]
    loader = DataLoader(data, sampler=sampler, batch_size=None)  # type: ignore[arg-type]
    return lambda epoch: loader


def stream(data: Any) -> Callable[[int], Any]:
    return lambda epoch: data


MADE: dict[str, tuple[Callable[[], Any], int]] = {
    "dataset": (Epochs, 0),
    "dataset with workers": (Epochs, 2),
    "subset": (lambda: Subset(Epochs(), range(NUM)), 0),
    "joined": (lambda: ConcatDataset([Epochs()]), 0),
    "stream": (lambda: stream(Shuffled()), 0),
    "stream in a loader": (lambda: stream(DataLoader(Shuffled(), batch_size=None)), 0),
    "stream by a sampler": (sampled, 0),
}


def train(folder: Path, name: str, *, max_steps: int | None = None) -> Tensor:
    """Return the samples [num_samples, 2] that a start trains on, in their order."""
    make, num_workers = MADE[name]
    task = Recorder()
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=4, num_workers=num_workers),
        trainer=TrainerConfig(num_epochs=3, max_steps=max_steps),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="epochs") as run:
        train_set = make()
        if not hasattr(train_set, "__len__"):
            train_set = StreamReader(train_set, NUM)
        build_trainer(
            run, model=nn.Linear(2, 1), task=task, train_set=train_set, eval_sets=Epochs()
        ).fit()
    return torch.cat(task.seen)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("subset", "stream") else [pytest.mark.slow])
        for name in MADE
    ],
)
def test_each_epoch_is_read_as_such_and_so_is_what_a_resume_has_left(
    tmp_path: Path, name: str
) -> None:
    whole = train(tmp_path / "whole", name)
    orders = [tuple(part.tolist()) for part in whole[:, 1].split(NUM)]
    assert len(set(orders)) == 3
    if name != "stream by a sampler":
        assert whole[:, 0].tolist() == [0.0] * NUM + [1.0] * NUM + [2.0] * NUM
    first = train(tmp_path / "parts", name, max_steps=5)
    rest = train(tmp_path / "parts", name)
    assert torch.equal(torch.cat([first, rest]), whole)
