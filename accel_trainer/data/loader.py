"""The training and the evaluation loader: the samples of a reader, the same on any hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat, tee
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import ENDLESS, BatchConfig, BatchPlan, split_evenly
from ..core.config import ABOVE_ZERO, AT_LEAST_ONE, Config
from ..core.errors import ConfigError
from ..core.types import Batch, LazyBatches, StepBatch
from ..core.wording import describe_tensor
from ..distributed.streams import has_streams
from .order import GIVE_LABELS, SampleOrder, choose_order, labels_of, to_tensor
from .own_order import OwnOrder
from .reader import Reader, checked
from .samples import Columns, check_dataset
from .stream import StreamReader
from .workers import WORKER_TIMEOUT_S, Collate, SampleReader

AnyReader = TypeVar("AnyReader", bound=Reader)


class TrainLoader(Generic[AnyReader]):
    """This process's step batches of the samples of `reader`, from any step on.

    They come in an `order` (None: each sample once, shuffled). A run prints `description` at its
    start.
    """

    description: str

    def __init__(
        self,
        reader: AnyReader,
        plan: BatchPlan,
        *,
        seed: int,
        device: torch.device,
        process_index: int = 0,
        order: SampleOrder | None = None,
    ) -> None:
        self.order = order or choose_order(BatchConfig(), len(reader))
        if plan.num_samples != self.order.num_samples:
            raise ValueError(
                f"the plan is for {plan.num_samples} samples, an epoch has {self.order.num_samples}"
            )
        self.reader = reader
        self.plan = plan
        self._num_samples = len(reader)
        self._seed = seed
        self._process_index = process_index
        self._to_device = DeviceCopy(device)

    def extremes(self) -> Batch:
        """Return some samples that are trained on, with the smallest and the largest labels."""
        return self.reader.extremes(self.order.kept)

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield the step batches of `epoch` from `first_step` on.

        A micro-batch moves to the device when it is indexed. Only a stream without `seek` reads
        what is before the first step. A stream without a length ends before the first step for
        which it lacks a sample, on all processes.

        Raises:
            DataError: samples cannot be read.
            ConfigError: the reader does not yield the samples that it was asked for.
        """
        order = self.order.draw(seed=self._seed, epoch=epoch)
        steps = range(first_step, self.plan.steps_per_epoch)
        to_read, parts_of_steps = tee(map(self._parts_of_step, steps))
        ids = (to_tensor(order[part.start : part.stop]) for parts in to_read for part in parts)
        batches = chain(self.reader.read(ids, epoch), repeat(None))
        for step, parts in zip(steps, parts_of_steps, strict=True):
            host: list[Batch | None] = []
            if self.plan.is_endless:
                # Before the step, so that no process waits in it for one without samples.
                host += islice(batches, len(parts))
                if host.pop() is None:
                    return
                parts.pop()
            make = partial(self._micro_batch, batches, host, parts, epoch)
            yield StepBatch(
                LazyBatches(make, len(parts)), num_samples=self.plan.step_batch_size(step)
            )
            # Also read micro-batches that nobody has indexed: the next step begins after them.
            host += islice(batches, len(parts) - len(host))
        next(batches)  # let the reader end: it may check its files

    def _parts_of_step(self, step: int) -> list[range]:
        """Return the micro-batches of this process, and of a stream also the step's last sample."""
        parts = self.plan.micro_batches(step, self._process_index)
        end = (step + 1) * self.plan.global_batch_size
        return [*parts, range(end - 1, end)] if self.plan.is_endless else parts

    def _micro_batch(
        self,
        batches: Iterator[Batch | None],
        host: list[Batch | None],
        parts: Sequence[range],
        epoch: int,
        index: int,
    ) -> Batch:
        """Return micro-batch `index` of a step on the device.

        `host` collects the step's micro-batches that were read, in host memory.
        """
        host += islice(batches, max(0, index + 1 - len(host)))
        read = host[index]
        finished = None if read is None else self.reader.finish(self._to_device(read), epoch)
        batch = checked(self.reader, finished, len(parts[index]))
        if not self.order.repeats:
            return batch
        return Batch(batch.inputs, batch.targets, batch.sample_ids % self._num_samples)


class EvalLoader(Generic[AnyReader]):
    """This process's evaluation batches: a contiguous slice of the samples, without padding."""

    def __init__(
        self,
        reader: AnyReader,
        *,
        batch_size: int,
        device: torch.device,
        num_processes: int = 1,
        process_index: int = 0,
        num_parts: int | None = None,
    ) -> None:
        self.reader = reader
        self.num_samples = len(reader)
        self._split = partial(
            split_evenly,
            batch_size=batch_size,
            num_processes=num_processes,
            process_index=process_index,
            num_parts=num_parts,
        )
        self._to_device = DeviceCopy(device)

    def first(self, num_samples: int) -> EvalLoader[AnyReader]:
        """Return a loader of at most the first `num_samples`."""
        few = copy(self)
        few.num_samples = min(num_samples, self.num_samples)
        return few

    def extremes(self) -> Batch:
        """Return some samples with the smallest and the largest labels."""
        return self.reader.extremes(range(self.num_samples))

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in order. Raises DataError if samples cannot be read."""
        parts = self._split(range(self.num_samples))
        for batch in self.reader.read(map(to_tensor, parts), None):
            yield self.reader.finish(self._to_device(batch), None)


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(Config):
    """How the samples of a map-style dataset become batches.

    Samples are `(input, target)` pairs, or what `collate` accepts. For a table, such as a
    `datasets.Dataset`, `columns` names the column of the inputs and the column of the targets.
    `SampleReader` documents `num_classes` and `timeout_s`. `labels` and `weights` are those of the
    training samples, for their order: see `choose_order`; by default the labels are those that the
    dataset has at hand. `order` returns the numbers of the samples of an epoch, from its number
    alone: a list or tensor, as long for each epoch, in which samples may be repeated or missing.
    It is asked twice. A step takes the next of them, and `--leave-out` drops some.
    """

    collate: Collate = field(default=default_collate, repr=False)
    columns: tuple[str, str] | None = None
    num_classes: int | None = None
    labels: Sequence[int] | Tensor | None = None
    weights: Sequence[float] | Tensor | None = None
    order: Callable[[int], Any] | None = None
    timeout_s: float = WORKER_TIMEOUT_S

    def __post_init__(self) -> None:
        if not (self.order is None or callable(self.order)):
            raise ConfigError(
                "ORDER",
                f"order= is {describe_tensor(self.order)}: give a function of the epoch that "
                "returns sample numbers",
            )
        AT_LEAST_ONE.check(self, "DatasetOptions", "num_classes")
        ABOVE_ZERO.check(self, "DatasetOptions", "timeout_s")


DEFAULT_OPTIONS = DatasetOptions()


def build_train_loader(
    data: Any,
    batch: BatchConfig,
    *,
    seed: int,
    accelerator: Accelerator,
    options: DatasetOptions = DEFAULT_OPTIONS,
    order: SampleOrder | None = None,
) -> TrainLoader[Any]:
    """Return this process's training loader over a map-style dataset or a reader.

    `order` is the one to follow (None: the one that `batch` and `options` ask for).

    Raises:
        ConfigError: the batch does not fit the data or the processes, the order of the samples
            cannot be had, or the dataset has no `len()` and `[index]`.
        DataError: there are fewer samples than processes.
    """
    reader = _reader_of(data, "the training set", batch, accelerator, options, seed=seed)
    if isinstance(reader, StreamReader):
        check_order_is_free(reader, batch, options)
        is_endless = reader.num_samples is None
        batch = replace(batch, order="stored", drop_last=batch.drop_last or is_endless)
    if order is None:
        labels = options.labels
        is_guessed = labels is None and batch.order == "balanced"
        if is_guessed:
            labels = labels_of(data, options.columns)
        order = choose_order(batch, len(reader), labels=labels, weights=options.weights)
        if options.order is not None:
            if batch.order != "uniform" or options.weights is not None:
                raise ConfigError(
                    "ORDER", "order= decides alone: leave out --batch.order and weights="
                )
            order = OwnOrder(options.order, order.kept, len(reader), accelerator).samples
        if is_guessed:
            _check_labels(reader, np.asarray(labels))
    return TrainLoader(
        reader,
        batch.plan(order.num_samples, num_processes=accelerator.num_processes),
        seed=seed,
        device=accelerator.device,
        process_index=accelerator.process_index,
        order=order,
    )


def _check_labels(reader: Reader, labels: np.ndarray[Any, Any]) -> None:
    """Raise ConfigError if some samples of a dataset have other classes than its labels at hand.

    They may have other numbers, and no class at all.
    """
    middle = len(reader) // 2
    try:
        batches = [reader.extremes(range(*half)) for half in ((0, middle), (middle, len(reader)))]
        targets = torch.cat([batch.targets for batch in batches]).numpy()
        at_hand = labels[torch.cat([batch.sample_ids for batch in batches]).numpy()]
        is_other = np.equal.outer(targets, targets) != np.equal.outer(at_hand, at_hand)
    except Exception:  # what collates otherwise, or cannot be read, is told in the first step
        return
    if targets.ndim == 1 and targets.dtype.kind in "biu" and is_other.any():
        raise ConfigError(
            "ORDER",
            "--batch.order balanced uses the labels that the dataset lists (its targets, labels or "
            f"last tensor), but its samples have different classes: {GIVE_LABELS}",
        )


def build_eval_loader(
    data: Any,
    batch: BatchConfig,
    *,
    num_parts: int,
    accelerator: Accelerator,
    options: DatasetOptions = DEFAULT_OPTIONS,
) -> EvalLoader[Any]:
    """Return this process's evaluation loader over a map-style dataset or a reader.

    `num_parts` is that of the training loader's plan.

    Raises:
        ConfigError: the dataset has no `len()` and `[index]`, or the stream no length.
    """
    reader = _reader_of(data, "an evaluation set", batch, accelerator, options)
    if len(reader) == ENDLESS:
        raise ConfigError("DATA_STREAM", "a stream to evaluate on has no length: give num_samples")
    return EvalLoader(
        reader,
        batch_size=batch.eval_batch_size,
        device=accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        num_parts=num_parts,
    )


def check_order_is_free(owner: object, batch: BatchConfig, options: DatasetOptions) -> None:
    """Raise ConfigError if settings ask for an order, and `owner` has one of its own."""
    has_flags = (batch.order, batch.leave_out) != ("uniform", None)
    own = (options.labels, options.weights, options.order)
    if has_flags or any(each is not None for each in own):
        raise ConfigError(
            "ORDER",
            f"a {type(owner).__name__} determines its own order: "
            "leave out --batch.order, --leave-out, labels=, weights= and order=",
        )


def _reader_of(
    data: Any,
    name: str,
    batch: BatchConfig,
    accelerator: Accelerator,
    options: DatasetOptions,
    *,
    seed: int = 0,
) -> Reader:
    if isinstance(data, Reader):
        return data
    check_dataset(data, name)
    if options.columns is not None:
        # default_collate would make a list of [B] of each place in a list.
        data = Columns(data, options.columns, reads_lists=options.collate is default_collate)
    return SampleReader(
        data,
        accelerator.device,
        seed=seed,
        num_workers=batch.num_workers,
        collate=options.collate,
        num_classes=options.num_classes,
        timeout_s=options.timeout_s,
    )


class DeviceCopy:
    """Copies batches to the device on a separate stream, while the previous step computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._stream = torch.Stream(device) if has_streams(device) else None

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, ready for use on the current stream."""
        if self._stream is None:
            return batch if self._is_on_cpu else batch.to(self._device)
        training = torch.accelerator.current_stream(self._device)
        with self._stream:
            moved = batch.sent_to(self._device)
        training.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            """Keep the memory until training has read it, so that the next copy cannot reuse it."""
            tensor.record_stream(training)
            return tensor

        # Objects move on the stream of the training, as nothing is known of their memory.
        return moved.map(keep).to(self._device)
