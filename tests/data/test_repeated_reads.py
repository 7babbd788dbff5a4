"""Samples that depend on what was read before are named at the start, and honest ones are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.data.loader import DatasetOptions
from accel_trainer.data.samples import Columns
from accel_trainer.data.workers import SampleReader

NUM = 48


class Vectors(Dataset[Any]):
    """Samples (vector [8], label), kept in memory, and what may change as they are read."""

    def __init__(self) -> None:
        self.inputs = torch.randn(NUM, 8, generator=torch.Generator().manual_seed(0))
        self.array = self.inputs.numpy().copy()
        self.generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator().manual_seed(3)
        self.random_state = np.random.RandomState(3)
        self.python_random = random.Random(3)
        generator = np.random.default_rng(0)
        self.transform = lambda sample: sample * float(generator.normal())
        self.read = lru_cache(None)(lambda index: self.inputs[index] + noise())
        self.cache: dict[int, Tensor] = {}
        self.list: list[Tensor | None] = [None] * NUM
        self.num_reads = 0
        self.last: Tensor | None = None
        self.mean = torch.zeros(8)

    def __len__(self) -> int:
        return NUM

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.inputs[index], index), index % 4


def noise() -> Tensor:
    return 0.1 * torch.randn(8)


def of_class(augment: Callable[[Any, Tensor, int], Tensor]) -> type[Vectors]:
    """Return a class of vectors that a function augments, of its name."""
    return type(augment.__name__, (Vectors,), {"augment": augment})


# --- samples that depend on earlier reads ---


@of_class
def numpy_generator(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample + torch.from_numpy(self.generator.normal(size=8)).float()


@of_class
def torch_generator(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample + torch.randn(8, generator=self.torch_generator)


@of_class
def random_state(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample.flip(0) if self.random_state.rand() < 0.5 else sample


@of_class
def python_random(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample * self.python_random.random()


@of_class
def augments_rarely(self: Any, sample: Tensor, index: int) -> Tensor:
    return -sample if self.generator.random() < 0.01 else sample


@of_class
def generator_of_a_transform(self: Any, sample: Tensor, index: int) -> Tensor:
    return self.transform(sample)


@of_class
def in_place(self: Any, sample: Tensor, index: int) -> Tensor:
    sample += noise()
    return sample


@of_class
def in_place_sometimes(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample.neg_() if random.random() < 0.5 else sample


@of_class
def in_place_without_randomness(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample.mul_(0.9)


@of_class
def in_place_in_an_array(self: Any, sample: Tensor, index: int) -> Tensor:
    row = self.array[index]
    row *= np.random.uniform(0.9, 1.1)
    return torch.from_numpy(row.copy())


@of_class
def keeps_augmented(self: Any, sample: Tensor, index: int) -> Tensor:
    if index not in self.cache:
        self.cache[index] = sample + noise()
    return self.cache[index]


@of_class
def keeps_augmented_in_a_list(self: Any, sample: Tensor, index: int) -> Tensor:
    if self.list[index] is None:
        self.list[index] = sample * np.random.rand()
    return self.list[index]


@of_class
def keeps_by_lru_cache(self: Any, sample: Tensor, index: int) -> Tensor:
    return self.read(index)


@of_class
def counts_reads(self: Any, sample: Tensor, index: int) -> Tensor:
    self.num_reads += 1
    return sample * (1 + 1e-3 * self.num_reads)


@of_class
def changes_after_every_tenth_read(self: Any, sample: Tensor, index: int) -> Tensor:
    self.num_reads += 1
    return sample + self.num_reads // 10


@of_class
def mixes_with_the_last(self: Any, sample: Tensor, index: int) -> Tensor:
    last, self.last = self.last, sample
    return sample if last is None else 0.8 * sample + 0.2 * last


@of_class
def running_mean(self: Any, sample: Tensor, index: int) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1 * sample
    return sample - self.mean


NAMED: dict[str, Callable[[], Any]] = {
    name: each for name, each in vars().copy().items() if Vectors in getattr(each, "__bases__", ())
}
NAMED |= {
    f"{name} in a {kind}": lambda name=name, wrap=wrap: wrap(NAMED[name]())
    for name in ("numpy_generator", "in_place", "keeps_augmented", "counts_reads")
    for kind, wrap in {
        "Subset": lambda data: Subset(data, range(5, NUM)),
        "ConcatDataset": lambda data: ConcatDataset([data]),
    }.items()
}


# --- honest samples ---


@of_class
def global_generators(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample * random.random() + np.random.rand() + noise()


@of_class
def draws_until_it_fits(self: Any, sample: Tensor, index: int) -> Tensor:
    while (drawn := random.random()) > 0.3:
        pass
    return sample * drawn


@of_class
def keeps_raw(self: Any, sample: Tensor, index: int) -> Tensor:
    if index not in self.cache:
        self.cache[index] = sample * 2
    return self.cache[index] + noise()


@of_class
def counts_for_a_log(self: Any, sample: Tensor, index: int) -> Tensor:
    self.num_reads += 1
    return sample + noise()


@of_class
def seeds_its_own_for_each_sample(self: Any, sample: Tensor, index: int) -> Tensor:
    self.torch_generator.manual_seed(index)
    return sample + torch.randn(8, generator=self.torch_generator)


@of_class
def seeds_from_the_global(self: Any, sample: Tensor, index: int) -> Tensor:
    generator = np.random.default_rng(np.random.randint(2**31))
    return sample * float(generator.normal())


class OpensLate(Vectors):
    """Sets up its table, with a shuffle, when it is first read."""

    table: Tensor | None = None

    def augment(self, sample: Tensor, index: int) -> Tensor:
        if self.table is None:
            self.table = self.inputs.mean(0)
            np.random.rand()
        return sample - self.table


class Memoised(Vectors):
    @cached_property
    def mean(self) -> Tensor:
        return self.inputs.mean(0)

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample - self.mean + noise()


@of_class
def repairs_in_place(self: Any, sample: Tensor, index: int) -> Tensor:
    return sample.clamp_(-1, 1) + noise()


@of_class
def remembers_the_last(self: Any, sample: Tensor, index: int) -> Tensor:
    self.last = sample
    return sample


class Rows:
    """A table with mappings as rows."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((3,), float(index)), "label": index % 3}


HONEST: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        Vectors,
        global_generators,
        draws_until_it_fits,
        keeps_raw,
        counts_for_a_log,
        seeds_its_own_for_each_sample,
        seeds_from_the_global,
        OpensLate,
        Memoised,
        repairs_in_place,
        remembers_the_last,
    )
} | {
    "columns": lambda: Columns(Rows(), ("image", "label")),
    "list": lambda: [(torch.ones(2), 0)] * 5,
    "one sample": lambda: [(torch.ones(2), 0)],
    "subset": lambda: Subset(global_generators(), range(3, 20)),
    "joined": lambda: ConcatDataset([keeps_raw(), global_generators()]),
}


def fingerprint(make: Callable[[], Any]) -> str:
    return SampleReader(make(), torch.device("cpu"), collate=DatasetOptions().collate).fingerprint()


def test_samples_that_depend_on_earlier_reads_are_named_by_their_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault (Resume): samples depend on what was read before: the dataset has its own generator,
    augments its samples in place, keeps augmented ones, or counts its reads -> a warning at the
    start, with the class of the dataset
    """
    for name, make in NAMED.items():
        caplog.clear()
        assert fingerprint(make) == "", name
        (line,) = caplog.messages
        assert line.startswith("[UNSAVED_STATE] sample "), name
        assert name.partition(" ")[0] in line, name


def test_samples_that_are_the_same_at_each_read_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, make in HONEST.items():
        assert fingerprint(make) == fingerprint(make) != "", name
        assert caplog.messages == [], name


def test_a_run_whose_data_has_a_given_fingerprint_names_them_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=8),
        trainer=TrainerConfig(num_epochs=1, max_steps=1),
        run=RunConfig(output_dir=tmp_path, quiet=True),
    )
    with start_run(config, recipe="given") as run:
        build_trainer(
            run,
            model=nn.Linear(8, 4),
            task=ClassificationTask(),
            train_set=in_place(),
            eval_sets=keeps_raw(),
            data_fingerprint="v1",
        )
    (line,) = [line for line in caplog.messages if "UNSAVED_STATE" in line]
    assert "in_place" in line
