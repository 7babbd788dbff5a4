"""What loaders need to know of a source of samples: a dataset, a stream, a database, photos."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.types import Batch
from ..core.wording import counted
from .fingerprint import fingerprint_samples
from .order import Ids


class Reader(ABC):
    """Reads batches of samples by their ids, which are their positions, from 0 on.

    `TrainLoader` and `EvalLoader` do the rest: the order, the share of each process, the resume and
    the copy to the device. Subclass it for data that is best read a batch at a time, such as rows
    of a database, and give it to `build_trainer` in place of a dataset.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch in host memory for each tensor of `ids`, int64 [B]; B may be 0.

        There may be many `ids`: take them one after another. They are the `sample_ids` of the
        batch. Where an epoch has a sample again, `len(self)` is added to its id each time: the
        sample is `id % len(self)`, and its randomness follows from `id`. `epoch` is None in
        evaluations.
        """

    def finish(self, batch: Batch, epoch: int | None) -> Batch:
        """Return a batch of `read`, which is on the device now, as the model gets it.

        It may be called several times for a batch.
        """
        return batch

    def fingerprint(self) -> str:
        """Return a hash that changes with the data, by default of some samples.

        Warns if a sample differs when it is read again. Empty: changed data is not noticed.
        """

        def read(index: int) -> list[Any]:
            batch = checked(self, next(self.read([torch.tensor([index])], None), None), 1)
            return [batch.inputs, batch.targets]

        return fingerprint_samples(read, len(self), name=type(self).__name__)

    def extremes(self, ids: Ids) -> Batch:
        """Return, of samples `ids`, some with the smallest and the largest labels, on the CPU.

        They are checked before any work. Raises any error if no labels are at hand.
        """
        raise NotImplementedError


def checked(reader: Reader, batch: Batch | None, size: int) -> Batch:
    """Return a `batch` of `reader`. Raises ConfigError unless there is one with `size` samples."""
    if batch is None or len(batch) != size:
        found = counted(len(batch or ()), "sample")
        raise ConfigError(
            "DATASET",
            f"{type(reader).__name__} read {found} for {counted(size, 'id')}: "
            "yield a batch with all samples for each tensor of ids",
        )
    return batch
