"""Seekable loaders over map-style datasets: the same samples and augmentation on any hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import BatchConfig, BatchPlan, split_evenly
from ..core.rng import epoch_permutation, fold_in
from ..core.types import Batch, LazyBatches, StepBatch
from ..distributed.streams import has_streams
from .samples import Columns, check_dataset
from .workers import WORKER_TIMEOUT_S, Collate, SampleReader


class DatasetLoader:
    """Training batches of the samples of `reader`, decoded as they are needed.

    Samples are seeded from (seed, epoch, sample id): augmentation is the same for any number of
    workers and processes, and after a resume.
    """

    def __init__(
        self, reader: SampleReader, plan: BatchPlan, *, seed: int, process_index: int = 0
    ) -> None:
        if plan.num_samples != len(reader):
            raise ValueError(
                f"the plan is for {plan.num_samples} samples, the dataset has {len(reader)}"
            )
        self.plan = plan
        self.fingerprint = reader.fingerprint
        self._reader = reader
        self._seed = seed
        self._process_index = process_index

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch` from `first_step` on."""
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        read = partial(self._reader.read, key=fold_in(self._seed, epoch))
        to_device = DeviceCopy(self._reader.device)
        yield from read_steps(
            self.plan, order, first_step, self._process_index, read=read, to_device=to_device
        )


class DatasetEvalLoader:
    """Evaluation batches of the samples of `reader`.

    Each process has a contiguous slice of the samples, without padding.
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        batch_size: int,
        num_processes: int = 1,
        process_index: int = 0,
        num_parts: int | None = None,
    ) -> None:
        self.num_samples = len(reader)
        self.fingerprint = reader.fingerprint
        self._reader = reader
        self._batches = split_evenly(
            range(self.num_samples), batch_size, num_processes, process_index, num_parts=num_parts
        )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples, in order."""
        ids = [torch.arange(batch.start, batch.stop) for batch in self._batches]
        yield from map(DeviceCopy(self._reader.device), self._reader.read(ids, key=0))


def build_dataset_loaders(
    train: Any,
    test: Any,
    batch: BatchConfig,
    *,
    seed: int,
    accelerator: Accelerator,
    collate: Collate = default_collate,
    num_classes: int | None = None,
    timeout_s: float = WORKER_TIMEOUT_S,
    columns: tuple[str, str] | None = None,
) -> tuple[DatasetLoader, DatasetEvalLoader]:
    """Return this process's training and evaluation loader over map-style datasets.

    Samples are `(input, target)` pairs, or what `collate` accepts. For a table, such as a
    `datasets.Dataset`, `columns` names the column of the inputs and the column of the targets.
    `SampleReader` documents the other options.

    Raises:
        ConfigError: the batch does not fit the data or the processes, or a dataset has no `len()`
            and `[index]`.
        DataError: there are fewer samples than processes.
    """

    def reader(dataset: Any, name: str) -> SampleReader:
        check_dataset(dataset, name)
        return SampleReader(
            dataset if columns is None else Columns(dataset, columns),
            accelerator.device,
            num_workers=batch.num_workers,
            collate=collate,
            num_classes=num_classes,
            timeout_s=timeout_s,
        )

    num_processes = accelerator.num_processes
    index = accelerator.process_index
    readers = (reader(train, "train"), reader(test, "test"))
    plan = batch.plan(len(train), num_processes=num_processes)
    loader = DatasetLoader(readers[0], plan, seed=seed, process_index=index)
    return loader, DatasetEvalLoader(
        readers[1],
        batch_size=batch.eval_batch_size,
        num_processes=num_processes,
        process_index=index,
        num_parts=plan.num_parts,
    )


def read_steps(
    plan: BatchPlan,
    order: Tensor,
    first_step: int,
    process_index: int,
    *,
    read: Callable[[Sequence[Tensor]], Iterator[Batch]],
    to_device: Callable[[Batch], Batch],
) -> Iterator[StepBatch]:
    """Yield a process's step batches of an epoch from `first_step` on.

    `order` [num_samples] holds the sample ids in the epoch's order. `read` takes the sample ids of
    all micro-batches, and yields a batch in host memory for each of them.
    """
    steps = range(first_step, plan.steps_per_epoch)
    positions = [plan.micro_batches(step, process_index) for step in steps]
    ids = [order[micro.start : micro.stop] for step_batch in positions for micro in step_batch]
    batches = read(ids)
    for step, step_batch in zip(steps, positions, strict=True):
        host: list[Batch] = []
        micro_batches = LazyBatches(partial(_read_up_to, batches, host, to_device), len(step_batch))
        yield StepBatch(micro_batches, num_samples=plan.step_batch_size(step))
        # Also read micro-batches that nobody has indexed: the next step begins after them.
        host += islice(batches, len(step_batch) - len(host))


def _read_up_to(
    batches: Iterator[Batch], host: list[Batch], to_device: Callable[[Batch], Batch], index: int
) -> Batch:
    """Return micro-batch `index` of a step on the device.

    `host` collects the step's micro-batches that were read, in host memory.
    """
    host += islice(batches, max(0, index + 1 - len(host)))
    return to_device(host[index])


class DeviceCopy:
    """Copies batches to the device on a separate stream, while the previous step computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, ready for use on the current stream."""
        if self._stream is None:
            return batch if self._device.type == "cpu" else batch.to(self._device)
        training = torch.accelerator.current_stream(self._device)
        with self._stream:
            moved = batch.to(self._device)
        training.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            """Keep the memory until training has read it, so that the next copy cannot reuse it."""
            tensor.record_stream(training)
            return tensor

        return moved.map(keep)
