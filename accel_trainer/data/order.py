"""The order of the training samples: which ones an epoch has, a pure function of seed and epoch.

An epoch may have a sample several times. The randomness of a sample, such as its augmentation,
follows from its id, so a repetition gets a drawn id of its own: the sample's id plus the size of
the dataset for each time before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.batch_plan import BatchConfig
from ..core.errors import ConfigError
from ..core.rng import epoch_permutation, fold_in
from .fingerprint import hash_value

_FIX = "give the labels of the samples as labels=, a tensor or list of class numbers"


@dataclass(frozen=True)
class SampleOrder:
    """An epoch has each of the `kept` sample ids, int64 [K], once.

    They are shuffled, unless `is_shuffled` is False.
    """

    kept: Tensor
    is_shuffled: bool = True

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        return len(self.kept)

    @property
    def fingerprint(self) -> str:
        """A hash of what a run's settings do not say about the order."""
        return hash_value([self.kept]).hex()

    def draw(self, *, seed: int, epoch: int) -> Tensor:
        """Return the drawn ids of `epoch` in their order, int64 [num_samples] on the CPU."""
        if not self.is_shuffled:
            return self.kept
        return self.kept[epoch_permutation(len(self.kept), seed=seed, epoch=epoch)]


@dataclass(frozen=True)
class WeightedOrder(SampleOrder):
    """An epoch has as many samples as there are, drawn with replacement.

    A sample's chance is its share of the `weights`, float64 [K].
    """

    weights: Tensor = torch.empty(0)
    dataset_size: int = 0

    @property
    def fingerprint(self) -> str:
        """A hash of the ids and their weights."""
        return hash_value([self.kept, self.weights]).hex()

    def draw(self, *, seed: int, epoch: int) -> Tensor:
        """Return the drawn ids of `epoch`, int64 [num_samples] on the CPU."""
        generator = torch.Generator().manual_seed(fold_in(seed, epoch))
        uniform = torch.rand(len(self.kept), dtype=torch.float64, generator=generator)
        ends = self.weights.cumsum(0)
        # Rounding may reach the end, where samples without weight may stand.
        places = torch.searchsorted(ends, uniform * ends[-1], right=True)
        ids = self.kept[places.clamp_max(int(self.weights.nonzero()[-1]))]
        return _number_repetitions(ids, self.dataset_size)


@dataclass(frozen=True)
class BalancedOrder(SampleOrder):
    """An epoch has the same number of samples of each class, and each of a class equally often.

    An epoch is as long as without balance, but for the rest of a division. A class goes through its
    samples in one random order after another, over the epochs: a small class repeats its samples
    within an epoch, a large one needs several epochs for all of them. `labels` [K] are integers.
    """

    labels: Tensor = torch.empty(0)
    dataset_size: int = 0

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        num_classes = len(self.labels.unique())
        return len(self.kept) // num_classes * num_classes

    @property
    def fingerprint(self) -> str:
        """A hash of the ids and their labels."""
        return hash_value([self.kept, self.labels]).hex()

    def draw(self, *, seed: int, epoch: int) -> Tensor:
        """Return the drawn ids of `epoch`, int64 [num_samples] on the CPU."""
        classes = self.labels.unique().tolist()
        quota = len(self.kept) // len(classes)
        ids = [
            _from_rounds(
                self.kept[self.labels == label], epoch * quota, quota, fold_in(seed, label)
            )
            for label in classes
        ]
        order = epoch_permutation(quota * len(classes), seed=seed, epoch=epoch)
        return _number_repetitions(torch.cat(ids)[order], self.dataset_size)


def _number_repetitions(ids: Tensor, dataset_size: int) -> Tensor:
    """Return the drawn ids of `ids` [M]."""
    by_id = ids.argsort(stable=True)
    in_order = ids[by_id]
    places = torch.arange(len(ids))
    is_repeated = torch.zeros(len(ids), dtype=torch.bool)
    is_repeated[1:] = in_order[1:] == in_order[:-1]
    first_places = places.masked_fill(is_repeated, 0).cummax(0).values
    drawn = ids.clone()
    drawn[by_id] += (places - first_places) * dataset_size
    return drawn


def _from_rounds(ids: Tensor, first: int, count: int, key: int) -> Tensor:
    """Return `count` of `ids` [M] from place `first` of an endless row of permutations on."""
    rounds = range(first // len(ids), (first + count - 1) // len(ids) + 1)
    row = torch.cat([ids[epoch_permutation(len(ids), seed=key, epoch=number)] for number in rounds])
    start = first - rounds.start * len(ids)
    return row[start : start + count]


def choose_order(
    batch: BatchConfig,
    num_samples: int,
    *,
    labels: Any = None,
    weights: Sequence[float] | Tensor | None = None,
) -> SampleOrder:
    """Return the order that `batch` asks for, over `num_samples` without those to leave out.

    `labels` [num_samples], a tensor, array or list of integers, are needed to balance classes.
    `weights` [num_samples] draw samples with replacement.

    Raises:
        ConfigError: an argument is missing, does not fit or has no use.
    """
    kept = torch.arange(num_samples)
    if batch.leave_out is not None:
        kept = _without(kept, batch.leave_out)
    if weights is not None:
        if batch.order != "uniform":
            fact = f"--batch.order {batch.order} and weights= both set the order of the samples"
            raise ConfigError("ORDER", f"{fact}: remove one of them")
        chances = torch.as_tensor(weights, dtype=torch.float64)
        _check_length(chances, num_samples, "weights=")
        if not bool(
            torch.isfinite(chances).all() & (chances >= 0).all() & (chances[kept] > 0).any()
        ):
            raise ConfigError("ORDER", "weights= must be 0 or more, and not all 0: correct them")
        return WeightedOrder(kept, weights=chances[kept], dataset_size=num_samples)
    if batch.order != "balanced":
        return SampleOrder(kept, is_shuffled=batch.order == "uniform")
    if labels is None:
        raise ConfigError("ORDER", f"--batch.order balanced does not know the classes: {_FIX}")
    classes = torch.as_tensor(labels)
    _check_length(classes, num_samples, "labels=")
    if classes.is_floating_point() or classes.is_complex():
        raise ConfigError("ORDER", f"labels= are {classes.dtype}: {_FIX}")
    return BalancedOrder(kept, labels=classes[kept].long(), dataset_size=num_samples)


def _check_length(values: Tensor, num_samples: int, name: str) -> None:
    if values.shape != (num_samples,):
        fact = f"{name} has the shape {list(values.shape)} for {num_samples} samples"
        raise ConfigError("ORDER", f"{fact}: give one number for each sample, [{num_samples}]")


def _without(ids: Tensor, path: Path) -> Tensor:
    """Return `ids` without those that the file lists, one in a line; `#` begins a comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        listed = torch.tensor([int(line) for line in lines if line], dtype=torch.int64)
    except (OSError, ValueError) as error:
        fact = f"--leave-out {path} cannot be read ({error})"
        raise ConfigError("ORDER", f"{fact}: give a file with one sample id in each line") from None
    unknown = listed[(listed < 0) | (listed >= len(ids))]
    if len(unknown):
        fact = f"--leave-out {path} lists sample {int(unknown[0])}, the ids are 0 to {len(ids) - 1}"
        raise ConfigError("ORDER", f"{fact}: correct the file")
    is_kept = torch.ones(len(ids), dtype=torch.bool)
    is_kept[listed] = False
    if not is_kept.any():
        raise ConfigError("ORDER", f"--leave-out {path} lists all samples: shorten it")
    return ids[is_kept]


def labels_of(dataset: Any, columns: tuple[str, str] | None = None) -> Any:
    """Return the labels that a dataset has at hand, without a read of its samples, or None.

    They are the second of the `columns` of a table, its `targets` or `labels`, as in torchvision's,
    the last tensor of a TensorDataset, or those of the samples of a Subset.
    """
    if columns is not None:
        return dataset[columns[1]]
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset
        labels = labels_of(dataset.dataset)
        return None if labels is None else torch.as_tensor(labels)[torch.as_tensor(dataset.indices)]
    tensors = getattr(dataset, "tensors", (None,))
    for found in (getattr(dataset, "targets", None), getattr(dataset, "labels", None), tensors[-1]):
        if found is not None:
            return found
    return None
