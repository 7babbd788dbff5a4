"""A Reader's samples follow from their ids and the epoch alone, and it returns the ids it got."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from accel_trainer import Batch, BatchConfig, ConfigError, Reader, build_train_loader
from accel_trainer.checks.reader_trial import try_reader

NUMBERS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))


class Rows(Reader):
    """Honest: the noise of a sample follows from its id and the epoch."""

    num_read = 0

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(0)
        self.numpy = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(NUMBERS)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        for each in ids:
            yield Batch(self.rows(each, epoch), each % 2, self.ids_of(each))

    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        noise = [
            torch.randn(4, generator=torch.Generator().manual_seed(1000 * (epoch or 0) + number))
            for number in ids.tolist()
        ]
        return NUMBERS[ids % len(self)] + torch.stack(noise)

    def ids_of(self, ids: Tensor) -> Tensor:
        return ids


class OwnGenerator(Rows):
    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        return NUMBERS[ids] + torch.randn(len(ids), 4, generator=self.own)


class NumpyGenerator(Rows):
    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        return NUMBERS[ids] + self.numpy.normal()


class Counter(Rows):
    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        self.num_read += len(ids)
        return NUMBERS[ids] * self.num_read


class OnlyInTraining(Counter):
    """As it should be in evaluations, of which the fingerprint reads samples."""

    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        return NUMBERS[ids] if epoch is None else super().rows(ids, epoch)


class InFinish(Rows):
    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        self.num_read += 1
        return batch.map(lambda tensor: tensor + self.num_read if tensor.ndim > 1 else tensor)


class GlobalGenerator(Rows):
    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        return NUMBERS[ids] + torch.randn(len(ids), 4)


class ByPlace(Rows):
    """Seeds a generator at the start of a reading: a resume starts it elsewhere."""

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(epoch or 0)
        for each in ids:
            yield Batch(NUMBERS[each] + torch.randn(4, generator=generator), each % 2, each)


class Padded(Rows):
    """Honest: pads to the longest sample of a batch."""

    def rows(self, ids: Tensor, epoch: int | None) -> Tensor:
        return NUMBERS[ids][:, : int(ids.max()) % 3 + 1]


class Zeros(Rows):
    def ids_of(self, ids: Tensor) -> Tensor:
        return ids * 0


class Places(Rows):
    def ids_of(self, ids: Tensor) -> Tensor:
        return torch.arange(len(ids))


class NextOnes(Rows):
    def ids_of(self, ids: Tensor) -> Tensor:
        return ids + 1


class Reduced(Rows):
    """Honest: a loader would do the same."""

    def ids_of(self, ids: Tensor) -> Tensor:
        return ids % len(self)


def loader_of(kind: type[Rows]) -> Any:
    accelerator = Accelerator(cpu=True)
    return build_train_loader(
        kind(), BatchConfig(per_device_batch_size=8), seed=0, accelerator=accelerator
    )


@pytest.mark.parametrize(
    "kind",
    [OwnGenerator, NumpyGenerator, Counter, OnlyInTraining, InFinish, GlobalGenerator, ByPlace],
)
def test_a_sample_that_differs_in_a_resume_is_named(
    kind: type[Rows], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        try_reader(loader_of(kind), Accelerator(cpu=True))
    (message,) = caplog.messages
    assert message.startswith("[UNSAVED_STATE] sample ")
    assert kind.__name__ in message


@pytest.mark.parametrize("kind", [Rows, Padded, Reduced])
def test_a_reader_whose_samples_follow_from_their_ids_is_left_alone(
    kind: type[Rows], caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(kind)
    state = torch.get_rng_state()
    try_reader(loader, Accelerator(cpu=True))
    assert caplog.messages == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [Zeros, Places, NextOnes])
def test_ids_that_nobody_asked_for_are_refused(kind: type[Rows]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} returned sample_ids") as refused:
        try_reader(loader_of(kind), Accelerator(cpu=True))
    assert refused.value.code == "DATASET"
