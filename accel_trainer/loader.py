"""Any map-style dataset as a seekable loader, with the same samples and the same augmentation for any hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from .accelerate_settings import reject_unsupported
from .plan import BatchConfig, BatchPlan, split_evenly
from .sample_reader import WORKER_TIMEOUT_S, Collate, SampleReader
from .seeding import epoch_permutation, fold
from .streams import has_streams
from .types import Batch, Window


class DatasetLoader:
    """Trains on the samples of `reader`, decoded as they are needed.

    They are seeded from (seed, epoch, sample id), so that augmentation is the same for any number of
    workers and processes and after any resume.
    """

    def __init__(self, reader: SampleReader, plan: BatchPlan, *, seed: int, process_index: int = 0) -> None:
        if plan.num_samples != len(reader):
            raise ValueError(f"the plan is for {plan.num_samples} samples, the dataset has {len(reader)}")
        self.plan = plan
        self._reader, self._seed, self._process_index = reader, seed, process_index

    def fingerprint(self) -> str:
        """Return what tells these data from others, at the cost of reading some samples."""
        return self._reader.fingerprint()

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield this process's windows of `epoch` from `first_step` on."""
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        steps = range(first_step, self.plan.steps_per_epoch)
        positions = [self.plan.micro_batches(step, self._process_index) for step in steps]
        ids = [order[micro.start : micro.stop] for window in positions for micro in window]
        batches, to_device = self._reader.read(ids, key=fold(self._seed, epoch)), DeviceCopy(self._reader.device)
        for step, window in zip(steps, positions, strict=True):
            micro_batches = _MicroBatches(batches, len(window), to_device)
            yield Window(micro_batches, num_items=self.plan.window_size(step))
            micro_batches.read_all()


class DatasetEvalLoader:
    """Evaluates on the samples of `reader`: a contiguous share per process, without padding."""

    def __init__(
        self, reader: SampleReader, *, batch_size: int, num_processes: int = 1, process_index: int = 0
    ) -> None:
        self._reader, self.num_samples = reader, len(reader)
        self._shares = split_evenly(
            range(self.num_samples), batch_size=batch_size, num_processes=num_processes, process_index=process_index
        )

    def fingerprint(self) -> str:
        """Return what tells these data from others, at the cost of reading some samples."""
        return self._reader.fingerprint()

    def batches(self) -> Iterator[Batch]:
        """Yield this process's share, in order."""
        ids = [torch.arange(share.start, share.stop) for share in self._shares]
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
) -> tuple[DatasetLoader, DatasetEvalLoader]:
    """Return this process's training and evaluation loader over map-style datasets of `(input, target)` pairs.

    The options are those of `SampleReader`.

    Raises:
        ConfigError: `accelerator` has settings that are not supported, such as `split_batches`.
    """
    reject_unsupported(accelerator)
    num_processes, process_index = accelerator.num_processes, accelerator.process_index
    train_reader, test_reader = (
        SampleReader(
            dataset,
            device=accelerator.device,
            num_workers=batch.num_workers,
            collate=collate,
            num_classes=num_classes,
            timeout_s=timeout_s,
        )
        for dataset in (train, test)
    )
    plan = batch.plan(len(train), num_processes=num_processes)
    return (
        DatasetLoader(train_reader, plan, seed=seed, process_index=process_index),
        DatasetEvalLoader(
            test_reader,
            batch_size=batch.eval_batch_size,
            num_processes=num_processes,
            process_index=process_index,
        ),
    )


class DeviceCopy:
    """Copies batches to the device by a stream of its own, so that a copy runs while the step before computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, for work of the current stream."""
        if self._stream is None:
            return batch if self._device.type == "cpu" else batch.to(self._device)
        training = torch.accelerator.current_stream(self._device)
        with self._stream:
            moved = batch.to(self._device)
        training.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            """Keep the memory until training has read it: the copies' stream would use it again before."""
            tensor.record_stream(training)
            return tensor

        return moved.map(keep)


class _MicroBatches(Sequence[Batch]):
    """The micro-batches of a step, read as they are asked for; one at a time is on the device."""

    def __init__(self, batches: Iterator[Batch], number: int, to_device: Callable[[Batch], Batch]) -> None:
        self._batches, self._number, self._to_device = batches, number, to_device
        self._read: list[Batch] = []

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._number))]
        position = range(self._number)[index]
        self._read += islice(self._batches, max(0, position + 1 - len(self._read)))
        return self._to_device(self._read[position])

    def read_all(self) -> None:
        """Read what has not been asked for, so that the next step begins where this one ends."""
        self._read += islice(self._batches, self._number - len(self._read))
