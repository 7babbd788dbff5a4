"""Loaders over data that is read from its beginning, such as a torch `IterableDataset`.

A run is resumed exactly if the stream itself is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import BatchConfig, BatchPlan, split_evenly
from ..core.errors import ConfigError, DataError
from ..core.types import Batch, StepBatch
from .dataloader import DeviceCopy, read_steps
from .samples import datasets_in, set_epoch
from .workers import Collate, SampleError, make_batch


@dataclass
class StreamLoader:
    """Training batches of the samples that `stream(epoch)` yields, in their order.

    Every process reads the whole stream and keeps its part; a resume reads the stream again up to
    its position. A run is exact if `stream(epoch)` yields the same samples in every process and at
    every call. The stream itself must shuffle, depending on the epoch.
    """

    stream: Callable[[int], Iterable[Any]]
    plan: BatchPlan
    _: KW_ONLY
    device: torch.device
    collate: Collate = default_collate
    process_index: int = 0

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch` from `first_step` on.

        Raises DataError if the stream ends early.
        """
        order = torch.arange(self.plan.num_samples)
        stream = self.stream(epoch)
        set_epoch(datasets_in(stream), epoch)
        read = partial(_read_batches, stream, collate=self.collate)
        to_device = DeviceCopy(self.device)
        yield from read_steps(
            self.plan, order, first_step, self.process_index, read=read, to_device=to_device
        )


@dataclass
class StreamEvalLoader:
    """Evaluation batches of the first `num_samples` of `stream()`.

    Each process has a contiguous slice of the samples.
    """

    stream: Callable[[], Iterable[Any]]
    num_samples: int
    _: KW_ONLY
    batch_size: int
    device: torch.device
    collate: Collate = default_collate
    num_processes: int = 1
    process_index: int = 0
    num_parts: int | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples, in order. Raises DataError if the stream ends early."""
        ranges = split_evenly(
            range(self.num_samples),
            self.batch_size,
            self.num_processes,
            self.process_index,
            num_parts=self.num_parts,
        )
        positions = [torch.arange(batch.start, batch.stop) for batch in ranges]
        batches = _read_batches(self.stream(), positions, collate=self.collate)
        yield from map(DeviceCopy(self.device), batches)


def build_stream_loaders(
    train: Callable[[int], Iterable[Any]],
    test: Callable[[], Iterable[Any]],
    batch: BatchConfig,
    *,
    num_train: int,
    num_test: int,
    accelerator: Accelerator,
    collate: Collate = default_collate,
) -> tuple[StreamLoader, StreamEvalLoader]:
    """Return this process's training and evaluation loader over streams.

    They read `num_train` samples of each `train(epoch)`, and `num_test` samples of `test()`.
    Samples are `(input, target)` pairs, or what `collate` accepts.

    Raises:
        ConfigError: `train` or `test` is not a function.
    """
    for call, stream in (("train(epoch)", train), ("test()", test)):
        if not callable(stream):
            raise ConfigError(
                "DATA_STREAM",
                f"an object of type {type(stream).__name__} cannot start a stream: "
                f"pass a function for which {call} yields samples",
            )
    num_processes = accelerator.num_processes
    index = accelerator.process_index
    plan = batch.plan(num_train, num_processes=num_processes)
    loader = StreamLoader(
        train, plan, device=accelerator.device, collate=collate, process_index=index
    )
    return loader, StreamEvalLoader(
        test,
        num_test,
        batch_size=batch.eval_batch_size,
        device=accelerator.device,
        collate=collate,
        num_processes=num_processes,
        process_index=index,
        num_parts=plan.num_parts,
    )


def _read_batches(
    stream: Iterable[Any], positions: Sequence[Tensor], *, collate: Collate
) -> Iterator[Batch]:
    """Yield a batch for each tensor of increasing positions; an empty tensor yields an empty batch.

    An empty batch is cut from a batch of one sample: sample 0, or the last one that was read.
    """
    samples = enumerate(stream)
    latest: Any = (-1, None)
    for batch_positions in positions:
        rows = []
        for wanted in batch_positions.tolist() or [0]:
            if latest[0] < wanted:
                latest = next(islice(samples, wanted - latest[0] - 1, None), None)
            if latest is None:
                raise DataError(
                    "DATA_STREAM",
                    f"the stream ended before sample {wanted}, counted from 0: "
                    "lower num_train or num_test, or yield more samples",
                )
            rows.append(latest)
        try:
            batch = make_batch(rows, collate=collate)
        except SampleError as error:
            raise error.as_data_error() from error
        yield batch if len(batch_positions) else batch.map(lambda tensor: tensor[:0])
