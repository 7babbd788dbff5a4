"""Any map-style dataset as a seekable loader, with the same samples and the same augmentation for any hardware."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from .plan import BatchConfig, BatchPlan
from .preemption import ignore_signals
from .seeding import epoch_permutation, fold
from .types import Batch, Window

Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Makes `(inputs, targets)` of a list of samples."""


class DatasetLoader:
    """Trains on any map-style dataset whose samples are `(input, target)` pairs, decoded as they are needed.

    Random transforms inside the dataset may use Python's, numpy's or torch's global generators: these
    are seeded from (seed, epoch, sample id) before each sample, so that augmentation is the same for
    any number of workers and processes and after any resume.
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
    ) -> None:
        if plan.num_samples != len(dataset):
            raise ValueError(f"the plan is for {plan.num_samples} samples, the dataset has {len(dataset)}")
        self.plan = plan
        self._dataset, self._seed, self._device = dataset, seed, device
        self._process_index, self._num_workers, self._collate = process_index, num_workers, collate

    def windows(self, epoch: int, first_step: int) -> Iterator[Window]:
        """Yield this process's windows of `epoch` from `first_step` on."""
        order = epoch_permutation(self.plan.num_samples, seed=self._seed, epoch=epoch)
        steps = range(first_step, self.plan.steps_per_epoch)
        positions = [self.plan.micro_batches(step, self._process_index) for step in steps]
        ids = [order[micro.start : micro.stop] for window in positions for micro in window]
        samples = _SeededSamples(self._dataset, key=fold(self._seed, epoch))
        batches = iter(_loader(samples, ids, self._num_workers, self._collate, self._device))
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
    ) -> None:
        self.num_samples = len(dataset)
        self._dataset, self._device, self._num_workers, self._collate = dataset, device, num_workers, collate
        share = torch.arange(self.num_samples).tensor_split(num_processes)[process_index]
        self._ids = list(share.split(batch_size)) if len(share) else []

    def batches(self) -> Iterator[Batch]:
        """Yield this process's share, in order."""
        samples = _SeededSamples(self._dataset, key=0)
        for batch in _loader(samples, self._ids, self._num_workers, self._collate, self._device):
            yield batch.to(self._device)


def build_dataset_loaders(
    train: Any,
    test: Any,
    batch: BatchConfig,
    *,
    seed: int,
    accelerator: Accelerator,
    collate: Collate = default_collate,
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
    )
    eval_loader = DatasetEvalLoader(
        test,
        batch_size=batch.eval_batch_size,
        device=accelerator.device,
        num_processes=num_processes,
        process_index=process_index,
        num_workers=batch.num_workers,
        collate=collate,
    )
    return loader, eval_loader


class _SeededSamples:
    """The dataset as seen by a worker: each sample drawn under its own seed, with its id."""

    def __init__(self, dataset: Any, *, key: int) -> None:
        self._dataset, self._key = dataset, key

    def __getitem__(self, sample_id: int) -> tuple[int, Any]:
        seed = fold(self._key, sample_id)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return sample_id, self._dataset[sample_id]


class _CollateBatch:
    """Makes a `Batch` of samples with their ids."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> Batch:
        inputs, targets = self._collate([sample for _, sample in samples])
        return Batch(inputs, targets, torch.tensor([sample_id for sample_id, _ in samples]))


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


def _loader(
    samples: _SeededSamples, ids: Sequence[Tensor], num_workers: int, collate: Collate, device: torch.device
) -> Iterator[Batch]:
    """Yield a batch for each tensor of ids; an empty one gives a batch of no rows, shaped by sample 0."""
    filled: Any = DataLoader(
        samples,  # type: ignore[arg-type]  # needs __getitem__ alone: the ids come from the batch sampler
        batch_sampler=[batch.tolist() for batch in ids if len(batch)],
        num_workers=num_workers,
        collate_fn=_CollateBatch(collate),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own: creating the iterator would draw from the global stream
        worker_init_fn=ignore_signals if num_workers else None,
    )
    batches = iter(filled)
    for batch in ids:
        if len(batch):
            yield next(batches)
        else:
            sample = _CollateBatch(collate)([samples[0]])
            yield Batch(sample.inputs[:0], sample.targets[:0], sample.sample_ids[:0])
