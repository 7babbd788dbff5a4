"""The loader of a user's own loop: its order is known, and each sample has its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import DataLoaderAdapter
from torch.utils.data import Subset, TensorDataset, default_collate

from ..checks.user_loader import torch_loader
from ..core.errors import ConfigError
from ..core.rng import fold_in, seed_generators
from ..data.samples import datasets_in, set_epoch

_ORDER = 0x6F72646572  # larger than any process index, which is the key of training


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
        self._base = base = torch_loader(loader)
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
        self._order.places = self._places(first)
        try:
            yield from self._loader
        finally:
            self._order.places = None

    def end(self) -> None:
        """Tell accelerate that the loader is not read to the end of the epoch."""
        if isinstance(self._loader, DataLoaderAdapter):
            self._loader.end()

    def _places(self, first: int) -> Generator[Any, None, None]:
        key = fold_in(self._seed, self.epoch, self._process_index)
        for number, batch in enumerate(self.batches[first:], first):
            start = fold_in(number, start=key)
            yield _Placed(batch, start, self.epoch) if self._draws else batch

    def _ask(self) -> list[list[int]]:
        """Return the order of the epoch, from the same state of all generators."""
        key = fold_in(self._seed, _ORDER, self.epoch)
        seed_generators(key)
        for owner in (self._base, *datasets_in(self._sampler)):
            for value in list(getattr(owner, "__dict__", {}).values()):  # a list has none
                if isinstance(value, torch.Generator):
                    value.manual_seed(key)
        set_epoch([self._loader, *datasets_in(self._sampler)], self.epoch)
        return [list(batch) for batch in self._sampler]


class _Placed(NamedTuple):
    """The numbers of a batch's samples, what their seeds begin with, and the epoch."""

    indices: Sequence[Any]
    start: int
    epoch: int


class _Around:
    """What the run puts around an object of the user's, whose attributes it has, too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:  # such as `classes`; accelerate asks for samplers
        # Not while it is unpickled, and no method of Python's.
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Order(_Around):
    """The batch sampler while the run reads: it yields what is to be read next."""

    places: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        # The run's own reading asks before the first place is taken, with workers twice.
        if self.places is None or getgeneratorstate(self.places) != GEN_CREATED:
            raise ConfigError(
                "LOOP_LOADER",
                "the loader was iterated outside run.batches(): iterate run.batches(), or give "
                "exact_run a loader of its own",
            )
        return self.places


class _PlacedSamples(_Around):
    """The dataset as a worker reads it: each sample after seeding the generators."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._parts = datasets_in(dataset)
        self._epoch = -1

    def __getitems__(self, placed: _Placed) -> list[Any]:
        """Return the samples of a batch, which torch asks for at once."""
        indices, start, epoch = placed
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch(self._parts, epoch)
        samples = []
        for place, index in enumerate(indices):
            seed_generators(fold_in(place, start=start))
            samples.append(self._inner[index])
        return samples


def _draws_nothing(base: Any) -> bool:
    """Whether no code of the user's reads a sample: rows of tensors, stacked as torch does."""
    dataset = base.dataset
    rows = dataset.dataset if type(dataset) is Subset else dataset
    return type(rows) is TensorDataset and base.collate_fn is default_collate
