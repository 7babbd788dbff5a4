"""Samples of a user's dataset to batches, in this process or in data workers; what fails there is named."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.sharedctypes import RawArray, RawValue
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from .errors import DataError
from .fingerprint import fingerprint_samples
from .preemption import ignore_signals, worker_deaths
from .seeding import fold
from .streams import has_streams
from .types import Batch

Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Makes `(inputs, targets)` of a list of samples."""

WORKER_TIMEOUT_S = 300.0
_WORKER_CHECK_S = 0.5


class SampleReader:
    """Batches of a map-style dataset of `(input, target)` pairs, read in this process or in `num_workers` of its own.

    Random transforms inside the dataset may use Python's, numpy's or torch's global generators: these
    are seeded before each sample, for it alone. The workers live as long as the reader. `device` is where the
    batches are for: they come in host memory, pinned for an accelerator.

    A sample that cannot be read, whose label is not below `num_classes` (None: not checked), or whose
    data worker dies or takes more than `timeout_s` for a batch, is a `DataError` that names it.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        num_workers: int = 0,
        collate: Collate = default_collate,
        num_classes: int | None = None,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self.dataset, self.device = dataset, device
        self._samples = _SeededSamples(dataset, num_workers=num_workers)
        self._order = _Order()
        self._make_batch = partial(_make_batch, collate=collate, num_classes=num_classes)
        self._loader: DataLoader[Batch] = DataLoader(
            self._samples,  # type: ignore[arg-type]  # needs __getitem__ alone: the ids come from the batch sampler
            batch_sampler=self._order,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=self._make_batch,
            pin_memory=has_streams(device),
            timeout=timeout_s if num_workers else 0,
            generator=torch.Generator(),  # its own: creating the iterator would draw from the global stream
            worker_init_fn=self._samples.start_worker if num_workers else None,
        )
        # Workers ignore the SIGTERM by which Python ends them at exit, and would be waited for.
        Finalize(self, setattr, (self._samples.is_over, "value", 1), exitpriority=0)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, ids: Sequence[Tensor], *, key: int) -> Iterator[Batch]:
        """Yield a batch for each tensor of ids; an empty one gives a batch of no rows, shaped by sample 0.

        `key` seeds the samples. A read that is not followed to its end is over when the next one begins.
        """
        self._order.key, self._order.ids = key, [batch for batch in ids if len(batch)]
        filled: Iterator[Batch] = iter(self._loader)
        worker_deaths.defer()
        for batch_ids in ids:
            try:
                with worker_deaths.heard():
                    batch = next(filled) if len(batch_ids) else self._no_rows(key)
            except (_SampleError, RuntimeError, EOFError, ConnectionError) as error:
                # Torch would wait for its workers: 20 s, and for a stuck one for ever.
                self._samples.is_over.value = 1
                if (explained := _explained(error, self._samples)) is None:
                    raise
                raise explained from error
            yield batch

    def fingerprint(self) -> str:
        """Return what tells these samples from others, at the cost of reading some of them."""
        try:
            return fingerprint_samples(lambda index: self._samples[0, index], len(self))
        except _SampleError as error:
            raise _explained(error, self._samples) from error  # type: ignore[misc]  # it explains all of this kind

    def _no_rows(self, key: int) -> Batch:
        return self._make_batch([self._samples[key, 0]]).map(lambda tensor: tensor[:0])


class _Order:
    """The keys and ids of the batches to read next: what a worker that outlives an epoch cannot know."""

    def __init__(self) -> None:
        self.key, self.ids = 0, list[Tensor]()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self.key, sample_id) for sample_id in batch.tolist()] for batch in self.ids)


class _SampleError(Exception):
    """Something of the user's that failed for certain samples: its one line says what, which and why."""


def _failed(what: str, error: Exception) -> _SampleError:
    return _SampleError(f"{what} ({' '.join(f'{type(error).__name__}: {error}'.split())})")


class _SeededSamples:
    """The dataset as seen by a worker: each sample drawn under its own seed, with its id.

    `last_begun` is for each worker, as main sees it, the sample that it began last; `is_over` ends them.
    """

    def __init__(self, dataset: Any, *, num_workers: int) -> None:
        self._dataset = dataset
        self.last_begun, self.is_over = RawArray("q", [-1] * num_workers), RawValue("b", 0)

    def start_worker(self, worker_id: int) -> None:
        """Let this worker outlive a signal to its group, and leave with main even if it is stuck."""
        ignore_signals()
        threading.Thread(target=self._leave_with_main, args=(os.getppid(),), daemon=True).start()

    def _leave_with_main(self, main_pid: int) -> None:
        while os.getppid() == main_pid and not self.is_over.value:
            time.sleep(_WORKER_CHECK_S)
        os._exit(0)

    def __getitem__(self, key_and_id: tuple[int, int]) -> tuple[int, Any]:
        key, sample_id = key_and_id
        if worker := get_worker_info():
            self.last_begun[worker.id] = sample_id
        seed = fold(key, sample_id)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            return sample_id, self._dataset[sample_id]
        except Exception as error:
            raise _failed(f"sample {sample_id} cannot be read", error) from error


def _make_batch(samples: list[tuple[int, Any]], *, collate: Collate, num_classes: int | None) -> Batch:
    """Make a `Batch` of samples with their ids, after a look at their labels, while they are on the host."""
    ids = [sample_id for sample_id, _ in samples]
    try:
        inputs, targets = collate([sample for _, sample in samples])
    except Exception as error:
        raise _failed(f"samples {', '.join(map(str, ids))} make no batch", error) from error
    if num_classes is not None:
        for sample_id, label in zip(ids, targets.tolist(), strict=True):
            if not 0 <= label < num_classes:
                raise _SampleError(f"sample {sample_id} has label {label}, the classes are 0 to {num_classes - 1}")
    return Batch(inputs, targets, torch.tensor(ids))


def _explained(error: Exception, samples: _SeededSamples) -> DataError | None:
    """Return what to tell of an error that came in the place of a batch; None: it is not about the data."""
    if isinstance(error, _SampleError):
        fact = str(error).rstrip().rpartition("_SampleError: ")[2]  # of a worker's whole traceback
        return DataError("DATA_SAMPLE", f"{fact}: mend it or leave it out; --debug shows the traceback")
    said = [text for text in (str(error.__cause__), str(error)) if text.startswith("DataLoader")]
    try:
        # The signal of a worker's death may come after its silence, or the reset of a connection to it,
        with worker_deaths.heard():
            time.sleep(_WORKER_CHECK_S)
    except RuntimeError as signalled:
        said = [str(signalled)]
    if not said:
        return None
    last = ", ".join(str(sample_id) for sample_id in samples.last_begun if sample_id >= 0) or "none"
    return DataError(
        "DATA_WORKER",
        f"{said[0].partition('. ')[0]} (the last samples begun: {last}): look at these, or read them with "
        "--batch.num-workers 0 to see the error itself",
    )
