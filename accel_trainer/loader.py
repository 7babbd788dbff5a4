"""Any map-style dataset as a seekable loader, with the same samples and the same augmentation for any hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate

from .plan import BatchConfig, BatchPlan
from .sample_reader import WORKER_TIMEOUT_S, Collate, SampleReader
from .seeding import epoch_permutation, fold
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

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield this process's windows of `epoch` from `first_step` on."""
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        steps = range(first_step, self.plan.steps_per_epoch)
        positions = [self.plan.micro_batches(step, self._process_index) for step in steps]
        ids = [order[micro.start : micro.stop] for window in positions for micro in window]
        batches = _on_device(self._reader.read(ids, key=fold(self._seed, epoch)), self._reader.device)
        for step, window in zip(steps, positions, strict=True):
            yield Window([next(batches) for _ in window], num_items=self.plan.window_size(step))


class DatasetEvalLoader:
    """Evaluates on the samples of `reader`: a contiguous share per process, no padding."""

    def __init__(
        self, reader: SampleReader, *, batch_size: int, num_processes: int = 1, process_index: int = 0
    ) -> None:
        self.num_samples = len(reader)
        share = torch.arange(self.num_samples).tensor_split(num_processes)[process_index]
        self._reader, self._ids = reader, list(share.split(batch_size)) if len(share) else []

    def batches(self) -> Iterator[Batch]:
        """Yield this process's share, in order."""
        yield from _on_device(self._reader.read(self._ids, key=0), self._reader.device)


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
    """
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


def _on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Move batches to the device: on CUDA by a stream, so that each comes while the step before still computes."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream = torch.cuda.Stream()
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.to(device)
        training = torch.cuda.current_stream()
        training.wait_stream(stream)
        for part in (moved.inputs, moved.targets, moved.sample_ids):
            part.record_stream(training)  # else its memory could be used again before training has read it
        yield moved
