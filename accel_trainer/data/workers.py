"""Batches of a user's dataset, read in-process or by data workers; errors name the sample."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import tee
from multiprocessing.sharedctypes import RawArray, RawValue
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from ..core.errors import ConfigError, DataError
from ..core.rng import fold_in, generator_states, seed_generators
from ..core.types import Batch
from ..core.user_code import describe_error
from ..distributed.streams import has_streams
from .fingerprint import fingerprint_samples, hash_value
from .order import Ids, labels_of, take
from .reader import Reader
from .samples import datasets_in, rows_of, set_epoch
from .signals import ignore_signals, worker_deaths

Collate = Callable[[list[Any]], Any]
"""Turns a list of samples into `(inputs, targets)`, or into a mapping, as the data collators of
transformers do: the value of `labels` is the targets, and the rest is the inputs."""

WORKER_TIMEOUT_S = 300.0
_WORKER_CHECK_S = 0.5
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class SampleReader(Reader):
    """Batches of a map-style dataset, read in-process or by `num_workers` worker processes.

    Samples are whatever `collate` accepts: `(input, target)` pairs for the default one. Random
    transforms inside the dataset may use Python's, numpy's or torch's global generators, which are
    seeded before each sample from (seed, epoch, sample id): augmentation is the same for any number
    of workers and processes, and after a resume. A `set_epoch` of the dataset is called where its
    samples are read. The workers live as long as the reader; on Linux they are forked, unless
    `multiprocessing.set_start_method("spawn")` was called. Batches are in host memory, which is
    pinned if `device` is an accelerator.

    A `DataError` names a sample that cannot be read, whose label is not below `num_classes` (None:
    not checked), or whose data worker dies or takes more than `timeout_s` for a batch.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate: Collate = default_collate,
        num_classes: int | None = None,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self.description = ""
        self._seed = seed
        is_plain = collate is default_collate
        self._samples = _SeededSamples(dataset, num_workers=num_workers, is_plain=is_plain)
        self._order = _Order()
        self._make_batch = partial(make_batch, collate=collate, num_classes=num_classes)
        self._loader: DataLoader[Batch] = DataLoader(
            # The batch sampler has the ids, so only __getitem__ is needed.
            self._samples,  # type: ignore[arg-type]
            batch_sampler=self._order,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=self._make_batch,
            pin_memory=has_streams(device),
            timeout=timeout_s if num_workers else 0,
            multiprocessing_context=_start_method() if num_workers else None,
            # Without a generator, creating the iterator would draw from the global one.
            generator=torch.Generator(),
            worker_init_fn=self._samples.start_worker,
        )
        # At exit, Python sends workers a SIGTERM, which they ignore, and then waits for them.
        Finalize(self, setattr, (self._samples.is_closed, "value", 1), exitpriority=0)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, ids: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yield a batch for each tensor of sample ids.

        An empty batch has the shapes of sample 0. A call ends an earlier `read` that was not
        exhausted.
        """
        key = 0 if epoch is None else fold_in(self._seed, epoch)
        ahead, ids = tee(ids)
        self._order.places = (
            [(key, sample_id, epoch) for sample_id in batch.tolist()]
            for batch in ahead
            if len(batch)
        )
        filled = self._start_workers()
        worker_deaths.defer()
        for batch_ids in ids:
            try:
                with worker_deaths.raised():
                    batch = next(filled) if len(batch_ids) else self._empty_batch(key)
            except (SampleError, RuntimeError, EOFError, ConnectionError) as error:
                # Otherwise torch would wait for its workers, and forever for one that is stuck.
                self._samples.is_closed.value = 1
                if (explained := _explain(error, self._samples)) is None:
                    raise
                raise explained from error
            yield batch

    def _start_workers(self) -> Iterator[Batch]:
        """Begin to read. Raises ConfigError if the dataset cannot be sent to worker processes."""
        try:
            return iter(self._loader)
        except Exception as error:  # pickle raises many kinds
            if "pickle" not in str(error):
                raise
            raise ConfigError(
                "DATASET",
                f"data workers cannot be given the dataset ({error}): "
                "define it at the top level of a file, without lambdas and open files, "
                "or use --num-workers 0",
            ) from error

    def fingerprint(self) -> str:
        """Return a hash of some samples; warn if reading them again gives others."""
        try:
            return fingerprint_samples(
                self._read_first,
                len(self),
                name=", ".join(type(part).__name__ for part in self._samples.parts),
                disturb=lambda number: self._samples[number, 0, None],
                read_state=self._read_state,
            )
        except SampleError as error:
            raise error.as_data_error() from error

    def _read_first(self, index: int) -> tuple[int, Any]:
        found = self._samples[0, index, None]
        if self._make_batch.keywords["collate"] is default_collate:
            self.description = _describe(found[1])
        return found

    def _read_state(self) -> bytes:
        """Return a hash of the global generators and of those that the datasets have."""
        own = [
            value
            for part in self._samples.parts
            for value in getattr(part, "__dict__", {}).values()
            if isinstance(value, _GENERATORS)
        ]
        return hash_value([*generator_states(), own])

    def extremes(self, ids: Ids) -> Batch:
        """Return, of samples `ids`, those with the two smallest and the two largest labels.

        They are found by the labels that the dataset has at hand. Raises any error if it has none.
        """
        labels = take(np.asarray(labels_of(self.dataset)), ids)
        first = np.unique(labels, return_index=True)[1] // (labels.size // len(ids))
        places = sorted({*first[:2].tolist(), *first[-2:].tolist()})
        return self._make_batch([self._samples[0, int(ids[place]), None] for place in places])

    def _empty_batch(self, key: int) -> Batch:
        one = self._make_batch([self._samples[key, 0, None]])
        return one.map(_none_of, lambda value: hasattr(value, "to"))


def _none_of(value: Any) -> Tensor:
    """Return no samples of a batch's tensor. Raises ConfigError for another object."""
    if isinstance(value, Tensor):
        return value[:0]
    raise ConfigError(
        "BATCH_SIZE",
        f"a process has no sample in this step, and a {type(value).__name__} cannot be empty: set "
        "--batch.drop-last, or take numbers of samples that divide evenly among the processes",
    )


_Place = tuple[int, int, int | None]
"""The key and the drawn id of a sample (see `order.py`), and its epoch; None in evaluations."""


def _start_method() -> str | None:
    """Return how data workers start: by a fork on Linux, unless the user has chosen to spawn them.

    From Python 3.14 on its default is a server, which must be sent the dataset by pickle, and whose
    processes do not see what this one has changed in its modules. None: Python's choice.
    """
    is_spawned = multiprocessing.get_start_method(allow_none=True) == "spawn"
    return "fork" if sys.platform == "linux" and not is_spawned else None


class _Order:
    """The batch sampler: the places of the batches to read next.

    The workers stay for all epochs, so each `read` changes it.
    """

    places: Iterable[list[_Place]] = ()

    def __iter__(self) -> Iterator[list[_Place]]:
        return iter(self.places)


class SampleError(Exception):
    """Some samples cannot be used: one line says which ones and why."""

    def as_data_error(self) -> DataError:
        """Return the error to show. torch cannot take one with a code out of a data worker."""
        # An error from a worker contains a whole traceback.
        fact = str(self).rstrip().rpartition("SampleError: ")[2]
        return DataError(
            "DATA_SAMPLE", f"{fact}: fix it or leave it out; --debug shows the traceback"
        )


class _SeededSamples:
    """The dataset as a worker reads it: each sample with its id, after seeding the generators.

    Two values are shared with the main process: `last_begun`, the last sample that each worker
    began to read, and `is_closed`, which ends the workers.
    """

    def __init__(self, dataset: Any, *, num_workers: int, is_plain: bool) -> None:
        self._dataset = dataset
        self._is_plain = is_plain
        self.parts = datasets_in(dataset)
        self._epoch: int | None = None
        self.last_begun = RawArray("q", [-1] * num_workers)
        self.is_closed = RawValue("b", 0)

    def start_worker(self, worker_id: int) -> None:
        """Ignore signals to the process group, and exit with the main process even if stuck."""
        ignore_signals()
        threading.Thread(target=self._exit_with_main, args=(os.getppid(),), daemon=True).start()

    def _exit_with_main(self, parent_pid: int) -> None:
        # A main process killed before this worker had begun is no longer its parent.
        main: Any = multiprocessing.parent_process()
        while os.getppid() == parent_pid and main.is_alive() and not self.is_closed.value:
            # Nothing reports the end of the parent process on every platform.
            time.sleep(_WORKER_CHECK_S)
        os._exit(0)

    def __getitems__(self, places: list[_Place]) -> list[tuple[int, Any]] | Collated:
        """Read the samples of a batch: of tensors, which draw nothing, in one call."""
        ids = [drawn_id % len(self._dataset) for _, drawn_id, _ in places]
        if not self._is_plain or (rows := rows_of(self._dataset, ids)) is None:
            return [self[place] for place in places]
        key, drawn_id, _ = places[-1]
        seed_generators(fold_in(key, drawn_id))  # as after the last sample
        return Collated(ids, rows)

    def __getitem__(self, place: _Place) -> tuple[int, Any]:
        """Read the sample at `place`."""
        key, drawn_id, epoch = place
        sample_id = drawn_id % len(self._dataset)
        if worker := get_worker_info():
            self.last_begun[worker.id] = sample_id
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            set_epoch(self.parts, epoch)
        seed_generators(fold_in(key, drawn_id))
        try:
            return sample_id, self._dataset[sample_id]
        except Exception as error:
            raise SampleError(
                f"sample {sample_id} cannot be read ({describe_error(error)})"
            ) from error


class Collated(NamedTuple):
    """Samples by their ids, as `default_collate` returns them."""

    ids: list[int]
    collated: list[Tensor]


def make_batch(
    samples: list[tuple[int, Any]] | Collated, *, collate: Collate, num_classes: int | None = None
) -> Batch:
    """Return the `Batch` of `(id, sample)` pairs. Labels are checked here, on the host.

    Raises SampleError if the samples cannot be collated, or a label is not one of `num_classes`.
    """
    if isinstance(samples, Collated):
        return _checked(*samples, num_classes)
    ids = [sample_id for sample_id, _ in samples]
    try:
        collated = collate([sample for _, sample in samples])
        return _checked(ids, collated, num_classes)
    except SampleError:
        raise
    except Exception as error:
        form_of = partial(
            recursively_apply,
            lambda value: getattr(value, "shape", type(value).__name__),
            test_type=lambda value: True,
        )
        forms = [str(form_of(sample)) for _, sample in samples]
        rarest = sorted({*forms}, key=forms.count)[:2]
        listed = " and ".join(f"{ids[forms.index(form)]} ({form})" for form in rarest)
        raise SampleError(
            f"samples such as {listed} cannot be collated into a batch "
            f"({describe_error(error)}): give them one shape, or set DatasetOptions(collate=...)"
        ) from error


def _checked(ids: list[int], collated: Any, num_classes: int | None) -> Batch:
    """Return the batch of samples. Raises SampleError for a label that is not a class."""
    inputs, targets = inputs_and_targets(collated)
    if num_classes is not None and isinstance(targets, Tensor):
        if targets.shape != (len(ids),):
            raise SampleError(
                f"num_classes= is for labels [{len(ids)}], the targets are {list(targets.shape)}"
            )
        for sample_id, label in zip(ids, targets.tolist(), strict=True):
            if not 0 <= label < num_classes:
                raise SampleError(
                    f"sample {sample_id} has label {label}, the classes are 0 to {num_classes - 1}"
                )
    return Batch(inputs, targets, torch.tensor(ids))


def inputs_and_targets(collated: Any) -> tuple[Any, Any]:
    """Split the result of a collate function into inputs and targets.

    The targets are the last of several parts, or the `labels` of a mapping, and else None.
    """
    if isinstance(collated, Mapping):
        inputs = {name: value for name, value in collated.items() if name != "labels"}
        return inputs, collated.get("labels")
    parts = collated if isinstance(collated, list | tuple) else [collated]
    *first, last = parts if len(parts) > 1 else (*parts, None)
    return first[0] if len(first) == 1 else tuple(first), last


def _describe(sample: Any) -> str:
    """Return a line that says what is what in a sample that is no pair; empty for a pair."""
    num_parts = len(sample) if isinstance(sample, list | tuple) else 1
    if num_parts > 2:
        return f"a sample has {num_parts} parts: the last is its target, the others its inputs\n"
    if num_parts == 2 or (isinstance(sample, Mapping) and "labels" in sample):
        return ""
    return "a sample has no target: it is the second of a pair, or the labels of a dict\n"


def _explain(error: Exception, samples: _SeededSamples) -> DataError | None:
    """Return the DataError that explains a missing batch; None if the data is not the cause."""
    if isinstance(error, SampleError):
        return error.as_data_error()
    texts = map(str, (error.__cause__, error))
    reasons = [text for text in texts if text.startswith("DataLoader")]
    try:
        # Wait for the signal of a worker's death: it may come after a timeout, or after the reset
        # of the worker's connection.
        with worker_deaths.raised():
            time.sleep(_WORKER_CHECK_S)
    except RuntimeError as death:
        reasons = [str(death)]
    if not reasons:
        return None
    last = ", ".join(str(sample_id) for sample_id in samples.last_begun if sample_id >= 0) or "none"
    return DataError(
        "DATA_WORKER",
        f"{reasons[0].partition('. ')[0]} (the last samples started: {last}): "
        "look at these, or read them with --num-workers 0 to see the error itself",
    )
