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
    """Samples (vector [8], label), kept in memory."""

    def __init__(self) -> None:
        self.inputs = torch.randn(NUM, 8, generator=torch.Generator().manual_seed(0))
        self.generator = np.random.default_rng(0)
        self.cache: dict[int, Tensor] = {}
        self.num_reads = 0
        self.last: Tensor | None = None

    def __len__(self) -> int:
        return NUM

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.inputs[index], index), index % 4


def noise() -> Tensor:
    return 0.1 * torch.randn(8)


# --- samples that depend on earlier reads ---


class NumpyGenerator(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample + torch.from_numpy(self.generator.normal(size=8)).float()


class TorchGenerator(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample + torch.randn(8, generator=self.own)


class RandomState(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.RandomState(3)

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample.flip(0) if self.own.rand() < 0.5 else sample


class PythonRandom(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(3)

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample * self.own.random()


class RarelyAugments(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        return -sample if self.generator.random() < 0.01 else sample


class GeneratorOfATransform(Vectors):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.transform = lambda sample: sample * float(generator.normal())

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return self.transform(sample)


class InPlace(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        sample += noise()
        return sample


class InPlaceSometimes(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        if random.random() < 0.5:
            sample.neg_()
        return sample


class InPlaceWithoutRandomness(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample.mul_(0.9)


class InPlaceArray(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.array = self.inputs.numpy().copy()

    def augment(self, sample: Tensor, index: int) -> Tensor:
        row = self.array[index]
        row *= np.random.uniform(0.9, 1.1)
        return torch.from_numpy(row.copy())


class KeepsAugmented(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = sample + noise()
        return self.cache[index]


class KeepsAugmentedInAList(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor | None] = [None] * NUM

    def augment(self, sample: Tensor, index: int) -> Tensor:
        kept = self.kept[index]
        if kept is None:
            kept = self.kept[index] = sample * np.random.rand()
        return kept


class KeepsByLruCache(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.read = lru_cache(None)(lambda index: self.inputs[index] + noise())

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return self.read(index)


class CountsReads(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        self.num_reads += 1
        return sample * (1 + 1e-3 * self.num_reads)


class GrowsHarder(Vectors):
    """Changes after every tenth read only."""

    def augment(self, sample: Tensor, index: int) -> Tensor:
        self.num_reads += 1
        return sample + self.num_reads // 10


class MixesWithTheLast(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        last, self.last = self.last, sample
        return sample if last is None else 0.8 * sample + 0.2 * last


class RunningMean(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def augment(self, sample: Tensor, index: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * sample
        return sample - self.mean


NAMED: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        NumpyGenerator,
        TorchGenerator,
        RandomState,
        PythonRandom,
        RarelyAugments,
        GeneratorOfATransform,
        InPlace,
        InPlaceSometimes,
        InPlaceWithoutRandomness,
        InPlaceArray,
        KeepsAugmented,
        KeepsAugmentedInAList,
        KeepsByLruCache,
        CountsReads,
        GrowsHarder,
        MixesWithTheLast,
        RunningMean,
    )
}
NAMED |= {
    f"{name} in a {kind}": lambda name=name, wrap=wrap: wrap(NAMED[name]())
    for name in ("NumpyGenerator", "InPlace", "KeepsAugmented", "CountsReads")
    for kind, wrap in {
        "Subset": lambda data: Subset(data, range(5, NUM)),
        "ConcatDataset": lambda data: ConcatDataset([data]),
    }.items()
}


# --- honest samples ---


class GlobalGenerators(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample * random.random() + np.random.rand() + noise()


class RejectionSampling(Vectors):
    """Draws a number of times that depends on what is drawn."""

    def augment(self, sample: Tensor, index: int) -> Tensor:
        while (drawn := random.random()) > 0.3:
            pass
        return sample * drawn


class KeepsRaw(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = sample * 2
        return self.cache[index] + noise()


class CountsForALog(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
        self.num_reads += 1
        return sample + noise()


class SeedsItsOwn(Vectors):
    """Its generator starts again with each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    def augment(self, sample: Tensor, index: int) -> Tensor:
        self.own.manual_seed(index)
        return sample + torch.randn(8, generator=self.own)


class SeedsFromTheGlobal(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
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


class ClampsInPlace(Vectors):
    """Repairs a sample where it lies: a second time changes nothing."""

    def augment(self, sample: Tensor, index: int) -> Tensor:
        return sample.clamp_(-1, 1) + noise()


class RemembersTheLast(Vectors):
    def augment(self, sample: Tensor, index: int) -> Tensor:
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
        GlobalGenerators,
        RejectionSampling,
        KeepsRaw,
        CountsForALog,
        SeedsItsOwn,
        SeedsFromTheGlobal,
        OpensLate,
        Memoised,
        ClampsInPlace,
        RemembersTheLast,
    )
} | {
    "columns": lambda: Columns(Rows(), ("image", "label")),
    "list": lambda: [(torch.ones(2), 0)] * 5,
    "one sample": lambda: [(torch.ones(2), 0)],
    "subset": lambda: Subset(GlobalGenerators(), range(3, 20)),
    "joined": lambda: ConcatDataset([KeepsRaw(), GlobalGenerators()]),
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
            train_set=InPlace(),
            eval_sets=KeepsRaw(),
            data_fingerprint="v1",
        )
    (line,) = [line for line in caplog.messages if "UNSAVED_STATE" in line]
    assert "InPlace" in line
