"""The loader of a user's own loop: its order is known, and each sample has its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from ..core.errors import ConfigError
from ..core.rng import fold_in, seed_generators
from ..data.samples import datasets_in, set_epoch

_ORDER = 0x6F72646572  # larger than any process index, which is the key of training
_FIX = "give a torch DataLoader over a map-style dataset, as accelerator.prepare returns it"


class OrderedLoader:
    """Reads the batches of an epoch from any place on, the same after each start.

    `loader` is the user's, perhaps as `accelerator.prepare` returns it. It stays the object that
    accelerate knows. While the run has it, its batch sampler and its dataset are wrapped: sample
    indices travel with a seed that depends on (`seed`, epoch, process, place in the epoch).

    Raises ConfigError for a loader that cannot be continued in the middle.
    """

    def __init__(self, loader: Any, *, seed: int, process_index: int) -> None:
        self._loader = loader
        self._seed = seed
        self._process_index = process_index
        self._base = base = _checked(loader)
        self._sampler = base.batch_sampler
        self._order = _Order(self._sampler)
        self.dataset = base.dataset
        self._draws = not _draws_nothing(base)
        self.epoch = -1
        self.batches: Sequence[Sequence[int]] = ()
        """The sample numbers of each of this process's batches in the epoch."""
        base._iterator = None  # of workers that have the dataset without its seeds
        # torch refuses to set these: it does not expect them to be wrapped.
        vars(base)["batch_sampler"] = self._order
        if self._draws:
            vars(base)["dataset"] = _PlacedSamples(self.dataset)

    def close(self) -> None:
        """Give the loader back as it was."""
        self._base._iterator = None
        vars(self._base).update(batch_sampler=self._sampler, dataset=self.dataset)

    def begin(self, epoch: int) -> None:
        """Find out the order of an epoch.

        Raises ConfigError in the first epoch of this start if the sampler, asked again, gives
        another one.
        """
        is_first = self.epoch < 0
        self.epoch = epoch
        self.batches = self._ask()
        if is_first and self._ask() != self.batches:
            name = type(getattr(self._sampler, "sampler", self._sampler)).__name__
            raise ConfigError(
                "LOOP_ORDER",
                f"{name} gives a different order when it is asked again for the same epoch, so a "
                "resume could not continue it: let it draw from the global generators of torch, "
                "numpy or Python, from a torch.Generator of its own, or by set_epoch(epoch)",
            )

    def digest(self) -> int:
        """Return a hash of the epoch's order on this process, of 56 bits."""
        return int(hashlib.sha256(repr(self.batches).encode()).hexdigest()[:14], 16)

    def read(self, first: int) -> Iterator[Any]:
        """Yield the batches of the epoch from number `first` on; earlier ones are not read."""
        self._order.read = (
            partial(self._with_seeds, first) if self._draws else partial(self._from, first)
        )
        try:
            yield from self._loader
        finally:
            self._order.read = None

    def end(self) -> None:
        """Tell accelerate that the loader is not read to the end of the epoch."""
        if isinstance(self._loader, DataLoaderAdapter):
            self._loader.end()

    def _from(self, first: int) -> Iterator[Sequence[int]]:
        return iter(self.batches[first:])

    def _with_seeds(self, first: int) -> Iterator[list[_Place]]:
        key = fold_in(self._seed, self.epoch, self._process_index)
        for number, batch in enumerate(self._from(first), first):
            start = fold_in(number, start=key)
            yield [
                (index, fold_in(place, start=start), self.epoch)
                for place, index in enumerate(batch)
            ]

    def _ask(self) -> list[list[int]]:
        """Return the order of the epoch, from the same state of all generators."""
        key = fold_in(self._seed, _ORDER, self.epoch)
        seed_generators(key)
        for owner in (self._base, *_samplers(self._sampler)):
            for value in list(getattr(owner, "__dict__", {}).values()):  # a list has none
                if isinstance(value, torch.Generator):
                    value.manual_seed(key)
        follow = getattr(self._loader, "set_epoch", None)
        if callable(follow):
            follow(self.epoch)
        for sampler in _samplers(self._sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        return [list(batch) for batch in self._sampler]


_Place = tuple[int, int, int]
"""The number of a sample, the seed to read it with, and the epoch."""


class _Order:
    """The batch sampler while the run reads: it yields what is to be read next."""

    read: Callable[[], Iterator[Any]] | None = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        if self.read is None:
            raise ConfigError(
                "LOOP_LOADER",
                "the loader was iterated outside of run.batches(): iterate run.batches(), or give "
                "exact_run a loader of its own",
            )
        return self.read()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:  # accelerate asks for its sampler
        return getattr(_inner(self, "_sampler", name), name)


class _PlacedSamples:
    """The dataset as a worker reads it: each sample after seeding the generators."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._parts = datasets_in(dataset)
        self._epoch = -1

    def __getitems__(self, places: Sequence[_Place]) -> list[Any]:
        """Return the samples of a batch, which torch asks for at once."""
        if (epoch := places[0][2]) != self._epoch:
            self._epoch = epoch
            set_epoch(self._parts, epoch)
        samples = []
        for index, key, _ in places:
            seed_generators(key)
            samples.append(self._dataset[index])
        return samples

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:  # such as `classes`, for the user
        return getattr(_inner(self, "_dataset", name), name)


def _inner(wrapper: object, attribute: str, name: str) -> Any:
    """Return what `wrapper` wraps, but not while it is unpickled, or for a method of Python."""
    if name.startswith("__") or attribute not in vars(wrapper):
        raise AttributeError(name)
    return vars(wrapper)[attribute]


def _checked(loader: Any) -> Any:
    """Return the torch DataLoader that reads the samples. Raises ConfigError for other kinds."""
    base = loader.base_dataloader if isinstance(loader, DataLoaderAdapter) else loader
    if (reason := _reason_against(loader, base)) is not None:
        raise ConfigError("LOOP_LOADER", reason)
    return base


def _reason_against(loader: Any, base: Any) -> str | None:
    """Return why a loader cannot be continued in the middle of an epoch, and the fix."""
    if not isinstance(base, DataLoader):
        return f"the loader is a {type(loader).__name__}: {_FIX}"
    if isinstance(base.dataset, IterableDataset):
        return f"the dataset is a stream, without numbers: {_FIX}"
    if isinstance(loader, DataLoaderDispatcher):
        return (
            "with dispatch_batches the main process reads for all, which cannot be continued "
            "exactly: use DataLoaderConfiguration(dispatch_batches=False)"
        )
    if hasattr(base, "state_dict"):
        return (
            "a stateful loader keeps a place of its own: use a plain DataLoader "
            "(use_stateful_dataloader=False), whose place the run keeps"
        )
    if not base.in_order:
        return "with in_order=False the fastest worker decides the order: use in_order=True"
    if base.batch_sampler is None:
        return "the loader makes no batches: give it a batch_size"
    try:
        len(base.batch_sampler)  # type: ignore[arg-type]  # not all have one
    except TypeError:
        return "the sampler has no length, so it has no epochs: give it a __len__"
    return None


def _draws_nothing(base: Any) -> bool:
    """Whether no code of the user's reads a sample: rows of tensors, stacked as torch does."""
    dataset = base.dataset
    rows = dataset.dataset if type(dataset) is Subset else dataset
    return type(rows) is TensorDataset and base.collate_fn is default_collate


def _samplers(sampler: Any) -> list[Any]:
    """Return a batch sampler and the samplers inside of it."""
    found = [sampler]
    for name in ("batch_sampler", "sampler"):
        if hasattr(sampler, name):
            found += _samplers(getattr(sampler, name))
    return found
