"""Any map-style dataset as a seekable loader, with the same samples and the same augmentation for any hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate

from .plan import BatchConfig, BatchPlan
from .sample_reader import WORKER_TIMEOUT_S, Collate, SampleReader
from .seeding import epoch_permutation, fold
from .types import Batch, Window


class DatasetLoader:
    """Trains on any map-style dataset whose samples are `(input, target)` pairs, decoded as they are needed.

    Random transforms inside the dataset may use Python's, numpy's or torch's global generators: these
    are seeded from (seed, epoch, sample id) before each sample, so that augmentation is the same for
    any number of workers and processes and after any resume.

    A sample that cannot be read, whose label is not below `num_classes` (None: not looked at), or whose
    data worker dies or takes more than `timeout_s` for a batch, is a `DataError` that names it.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        *,
        seed: int,
        device: torch.device,
        process_index: int = 0,
        num_workers: int = 0,
        collate: Collate = default_collate,
        num_classes: int | None = None,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        if plan.num_samples != len(dataset):
            raise ValueError(f"the plan is for {plan.num_samples} samples, the dataset has {len(dataset)}")
        self.plan = plan
        self._seed, self._process_index, self._device = seed, process_index, device
        self._reader = SampleReader(
            dataset=dataset,
            pin_memory=device.type == "cuda",
            num_workers=num_workers,
            collate=collate,
            num_classes=num_classes,
            timeout_s=timeout_s,
        )

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield this process's windows of `epoch` from `first_step` on."""
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        steps = range(first_step, self.plan.steps_per_epoch)
        positions = [self.plan.micro_batches(step, self._process_index) for step in steps]
        ids = [order[micro.start : micro.stop] for window in positions for micro in window]
        batches = self._reader.read(ids, key=fold(self._seed, epoch))
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        for step, window in zip(steps, positions, strict=True):
            micro_batches = [_moved(next(batches), self._device, stream) for _ in window]
            yield Window(micro_batches, num_items=self.plan.window_size(step))


class DatasetEvalLoader:
    """Evaluates on any map-style dataset of `(input, target)` pairs: a contiguous share per process, no padding."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        device: torch.device,
        num_processes: int = 1,
        process_index: int = 0,
        num_workers: int = 0,
        collate: Collate = default_collate,
        num_classes: int | None = None,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self.num_samples = len(dataset)
        share = torch.arange(self.num_samples).tensor_split(num_processes)[process_index]
        self._ids = list(share.split(batch_size)) if len(share) else []
        self._device = device
        self._reader = SampleReader(
            dataset=dataset,
            pin_memory=device.type == "cuda",
            num_workers=num_workers,
            collate=collate,
            num_classes=num_classes,
            timeout_s=timeout_s,
        )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's share, in order."""
        for batch in self._reader.read(self._ids, key=0):
            yield batch.to(self._device)


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
    """Return this process's training and evaluation loader over map-style datasets of `(input, target)` pairs."""
    num_processes, process_index = accelerator.num_processes, accelerator.process_index
    loader = DatasetLoader(
        train,
        batch.plan(len(train), num_processes=num_processes),
        seed=seed,
        device=accelerator.device,
        process_index=process_index,
        num_workers=batch.num_workers,
        collate=collate,
        num_classes=num_classes,
        timeout_s=timeout_s,
    )
    eval_loader = DatasetEvalLoader(
        test,
        batch_size=batch.eval_batch_size,
        device=accelerator.device,
        num_processes=num_processes,
        process_index=process_index,
        num_workers=batch.num_workers,
        collate=collate,
        num_classes=num_classes,
        timeout_s=timeout_s,
    )
    return loader, eval_loader


def _moved(batch: Batch, device: torch.device, stream: torch.cuda.Stream | None) -> Batch:
    """Move a batch to the device: on CUDA by `stream`, so that it comes while the step before still computes."""
    if stream is None:
        return batch.to(device)
    with torch.cuda.stream(stream):
        batch = batch.to(device)
    training = torch.cuda.current_stream()
    training.wait_stream(stream)
    for part in (batch.inputs, batch.targets, batch.sample_ids):
        part.record_stream(training)  # else its memory could be used again before training has read it
    return batch
