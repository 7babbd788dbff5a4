"""Data that can only be read from its beginning, such as a torch `IterableDataset`, as exact as it is itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import default_collate

from ..core.batch_plan import BatchConfig, BatchPlan, split_evenly
from ..core.errors import ConfigError, DataError
from ..core.types import Batch, StepBatch
from ..core.user_code import describe_error
from .dataloader import DeviceCopy, read_steps
from .workers import Collate, inputs_and_targets, unusable_samples


class StreamLoader:
    """Training batches of the samples that `stream(epoch)` yields, in their order.

    Every process reads the whole stream and keeps its part; a resume reads up to its position
    again. So a run is exact if `stream(epoch)` yields the same samples each time it is called, in
    any process, and shuffles by the epoch itself.
    """

    def __init__(
        self,
        stream: Callable[[int], Iterable[Any]],
        plan: BatchPlan,
        *,
        device: torch.device,
        collate: Collate = default_collate,
        process_index: int = 0,
    ) -> None:
        self.plan = plan
        self._stream, self._device, self._collate, self._process_index = (
            stream,
            device,
            collate,
            process_index,
        )

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        """Yield the step batches of `epoch` from `first_step` on.

        Raises DataError if the stream ends early.
        """
        order = torch.arange(self.plan.num_samples)
        read = partial(_read, self._stream(epoch), collate=self._collate)
        to_device = DeviceCopy(self._device)
        yield from read_steps(
            self.plan, order, first_step, self._process_index, read=read, to_device=to_device
        )


class StreamEvalLoader:
    """Evaluation batches of the first `num_samples` of `stream()`: a contiguous slice for each process."""

    def __init__(
        self,
        stream: Callable[[], Iterable[Any]],
        num_samples: int,
        *,
        batch_size: int,
        device: torch.device,
        collate: Collate = default_collate,
        num_processes: int = 1,
        process_index: int = 0,
        num_parts: int | None = None,
    ) -> None:
        self.num_samples = num_samples
        self._stream, self._device, self._collate = stream, device, collate
        samples = range(num_samples)
        self._batches = split_evenly(
            samples, batch_size, num_processes, process_index, num_parts=num_parts
        )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples, in order. Raises DataError if the stream is short."""
        ids = [torch.arange(batch.start, batch.stop) for batch in self._batches]
        yield from map(DeviceCopy(self._device), _read(self._stream(), ids, collate=self._collate))


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
    """Return this process's loaders over the `num_train` samples of each `train(epoch)` and the `num_test` of `test()`.

    Samples are `(input, target)` pairs, or what `collate` makes a batch of.

    Raises:
        ConfigError: `train` or `test` cannot be called like that.
    """
    for name, stream, arguments in (("train", train, (0,)), ("test", test, ())):
        try:
            with suppress(ValueError):  # some functions written in C have no signature
                inspect.signature(stream).bind(*arguments)
        except TypeError as error:
            fact, call = (
                f"{name} cannot start a stream ({error})",
                f"{name}({'epoch' if arguments else ''})",
            )
            raise ConfigError(
                "DATA_STREAM", f"{fact}: pass a function for which {call} yields samples"
            ) from error
    num_processes, index = accelerator.num_processes, accelerator.process_index
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


def _read(stream: Iterable[Any], ids: Sequence[Tensor], *, collate: Collate) -> Iterator[Batch]:
    """Yield a batch for each tensor of positions, which rise; without positions, a batch of no rows."""
    samples = enumerate(stream)
    latest: Any = None
    for batch_ids in ids:
        rows = []
        for wanted in batch_ids.tolist() or [0]:
            if latest is None or latest[0] < wanted:
                latest = next((sample for sample in samples if sample[0] == wanted), None)
            if latest is None:
                fact = f"the stream ended before sample {wanted}, counted from 0"
                raise DataError(
                    "DATA_STREAM", f"{fact}: lower num_train or num_test, or yield more samples"
                )
            rows.append(latest[1])
        positions = batch_ids if len(batch_ids) else torch.arange(len(rows))
        try:
            inputs, targets = inputs_and_targets(collate(rows))
        except Exception as error:
            what = (
                f"samples {', '.join(map(str, positions.tolist()))} cannot be collated into a batch"
            )
            raise unusable_samples(f"{what} ({describe_error(error)})") from error
        batch = Batch(inputs, targets, positions)
        yield batch if len(batch_ids) else batch.map(lambda tensor: tensor[:0])
