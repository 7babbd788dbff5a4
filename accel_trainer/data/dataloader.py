"""Seekable loaders over map-style datasets: the same samples and augmentation on any hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import BatchConfig, BatchPlan, split_evenly
from ..core.config import ABOVE_ZERO, AT_LEAST_ONE
from ..core.rng import fold_in
from ..core.types import Batch, LazyBatches, StepBatch
from ..distributed.streams import has_streams
from .order import SampleOrder, choose_order, labels_of, uniform_order
from .samples import Columns, check_dataset
from .workers import WORKER_TIMEOUT_S, Collate, SampleReader


class DatasetLoader:
    """Training batches of the samples of `reader` in an `order`, decoded as they are needed.

    Samples are seeded from (seed, epoch, sample id): augmentation is the same for any number of
    workers and processes, and after a resume.
    """

    def __init__(
        self,
        reader: SampleReader,
        plan: BatchPlan,
        *,
        seed: int,
        process_index: int = 0,
        order: SampleOrder | None = None,
    ) -> None:
        self.order = order or uniform_order(len(reader))
        if plan.num_samples != self.order.num_samples:
            raise ValueError(
                f"the plan is for {plan.num_samples} samples, an epoch has {self.order.num_samples}"
            )
        self.plan = plan
        self.fingerprint = reader.fingerprint
        self.extremes = partial(reader.extremes, self.order.kept)
        self._reader = reader
        self._seed = seed
        self._process_index = process_index

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield this process's step batches of `epoch` from `first_step` on."""
        order = self.order.draw(seed=self._seed, epoch=epoch)
        read = partial(self._reader.read, key=fold_in(self._seed, epoch), epoch=epoch)
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
        self.extremes = partial(reader.extremes, torch.arange(self.num_samples))
        self._reader = reader
        self._batches = split_evenly(
            range(self.num_samples), batch_size, num_processes, process_index, num_parts=num_parts
        )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples, in order."""
        ids = [torch.arange(batch.start, batch.stop) for batch in self._batches]
        yield from map(DeviceCopy(self._reader.device), self._reader.read(ids, key=0))


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How the samples of a map-style dataset become batches.

    Samples are `(input, target)` pairs, or what `collate` accepts. For a table, such as a
    `datasets.Dataset`, `columns` names the column of the inputs and the column of the targets.
    `SampleReader` documents `num_classes` and `timeout_s`. `labels` and `weights` are those of the
    training samples, for their order: see `choose_order`; by default the labels are those that the
    dataset has at hand.
    """

    collate: Collate = default_collate
    columns: tuple[str, str] | None = None
    num_classes: int | None = None
    labels: Sequence[int] | Tensor | None = None
    weights: Sequence[float] | Tensor | None = None
    timeout_s: float = WORKER_TIMEOUT_S

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check(self, "DatasetOptions", "num_classes")
        ABOVE_ZERO.check(self, "DatasetOptions", "timeout_s")


DEFAULT_OPTIONS = DatasetOptions()


def build_train_loader(
    dataset: Any,
    batch: BatchConfig,
    *,
    seed: int,
    accelerator: Accelerator,
    options: DatasetOptions = DEFAULT_OPTIONS,
) -> DatasetLoader:
    """Return this process's training loader over a map-style dataset.

    Raises:
        ConfigError: the batch does not fit the data or the processes, the order of the samples
            cannot be had, or the dataset has no `len()` and `[index]`.
        DataError: there are fewer samples than processes.
    """
    reader = _build_reader(dataset, "the training set", batch, accelerator, options)
    labels = options.labels
    if labels is None and batch.order == "balanced":
        labels = labels_of(dataset, options.columns)
    order = choose_order(batch, len(reader), labels=labels, weights=options.weights)
    plan = batch.plan(order.num_samples, num_processes=accelerator.num_processes)
    return DatasetLoader(
        reader, plan, seed=seed, process_index=accelerator.process_index, order=order
    )


def build_eval_loader(
    dataset: Any,
    batch: BatchConfig,
    *,
    num_parts: int,
    accelerator: Accelerator,
    options: DatasetOptions = DEFAULT_OPTIONS,
) -> DatasetEvalLoader:
    """Return this process's evaluation loader over a map-style dataset.

    `num_parts` is that of the training loader's plan.

    Raises:
        ConfigError: the dataset has no `len()` and `[index]`.
    """
    return DatasetEvalLoader(
        _build_reader(dataset, "an evaluation set", batch, accelerator, options),
        batch_size=batch.eval_batch_size,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        num_parts=num_parts,
    )


def _build_reader(
    dataset: Any,
    name: str,
    batch: BatchConfig,
    accelerator: Accelerator,
    options: DatasetOptions,
) -> SampleReader:
    check_dataset(dataset, name)
    return SampleReader(
        dataset if options.columns is None else Columns(dataset, options.columns),
        accelerator.device,
        num_workers=batch.num_workers,
        collate=options.collate,
        num_classes=options.num_classes,
        timeout_s=options.timeout_s,
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
            moved = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        training.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            """Keep the memory until training has read it, so that the next copy cannot reuse it."""
            tensor.record_stream(training)
            return tensor

        # Objects move on the stream of the training, as nothing is known of their memory.
        return moved.map(keep).to(self._device)
