"""The order of the training samples: which ones an epoch has, a pure function of seed and epoch.

An epoch may have a sample several times. The randomness of a sample, such as its augmentation,
follows from its id, so a repetition gets a drawn id of its own: the sample's id plus the size of
the dataset for each time before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.batch_plan import BatchConfig
from ..core.errors import ConfigError
from ..core.rng import epoch_permutation, fold_in
from ..core.wording import counted
from .fingerprint import hash_value

GIVE_LABELS = "give the labels of the samples as labels=, a tensor or list of class numbers"

Ids = range | Tensor
"""Sample ids, int64 on the CPU; a range takes no memory, however many samples there are."""


def to_tensor(ids: Ids) -> Tensor:
    """Return sample ids as int64 [N]."""
    return torch.arange(ids.start, ids.stop) if isinstance(ids, range) else ids


def take(values: Any, ids: Ids) -> Any:
    """Return the `values` [N] of samples `ids`, for a range as a view."""
    return values[ids.start : ids.stop] if isinstance(ids, range) else values[ids]


@dataclass(frozen=True)
class SampleOrder:
    """Which samples an epoch has, and in which order.

    `draw(seed=..., epoch=...)` returns the drawn ids of an epoch, [num_samples]. They are of the
    `kept` samples, [K]. `fingerprint` is a hash of what the settings of a run do not say about the
    order. `repeats`: an epoch may have a sample several times. `state` is what checkpoints store of
    an order that does not follow from the settings.
    """

    kept: Ids
    num_samples: int
    draw: Callable[..., Ids]
    fingerprint: str
    repeats: bool = True
    state: Any = None


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
    kept: Ids = range(num_samples)
    if batch.leave_out is not None:
        kept = _without(range(num_samples), batch.leave_out)
    if weights is not None:
        if batch.order != "uniform":
            raise ConfigError(
                "ORDER",
                f"--batch.order {batch.order} and weights= both set the order of the samples: "
                "remove one of them",
            )
        return _weighted(to_tensor(kept), weights, num_samples)
    if batch.order == "balanced":
        return _balanced(to_tensor(kept), labels, num_samples)
    draw = _shuffled if batch.order == "uniform" else _stored
    return SampleOrder(kept, len(kept), partial(draw, kept), _hash(kept), repeats=False)


def _stored(kept: Ids, *, seed: int, epoch: int) -> Ids:
    return kept


def _shuffled(kept: Ids, *, seed: int, epoch: int) -> Tensor:
    places = epoch_permutation(len(kept), seed=seed, epoch=epoch)
    return places if isinstance(kept, range) else kept[places]


def _weighted(kept: Tensor, weights: Sequence[float] | Tensor, num_samples: int) -> SampleOrder:
    """Return the order in which an epoch has K samples, drawn with replacement.

    A sample's chance is its share of the weights.
    """
    chances = _read_numbers(weights, num_samples, "weights=", "biuf", "give numbers").double()[kept]
    if not (chances.isfinite() & (chances >= 0)).all() or not chances.any():
        raise ConfigError("ORDER", "weights= must be 0 or more, and not all 0: correct them")

    def draw(*, seed: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(fold_in(seed, epoch))
        uniform = torch.rand(len(kept), dtype=torch.float64, generator=generator)
        ends = chances.cumsum(0)
        # Rounding may reach the end, where samples without weight may stand.
        places = torch.searchsorted(ends, uniform * ends[-1], right=True)
        return number_repetitions(kept[places.clamp_max(int(chances.nonzero()[-1]))], num_samples)

    return SampleOrder(kept, len(kept), draw, _hash(kept, chances))


def _balanced(kept: Tensor, labels: Any, num_samples: int) -> SampleOrder:
    """Return the order in which an epoch has the same number of samples of each class.

    An epoch is as long as without balance, but for samples without a label (-100 and the like) and
    the rest of a division. A class goes through its
    samples in one random order after another, over the epochs: a small class repeats its samples
    within an epoch, a large one needs several epochs for all of them.
    """
    if labels is None:
        raise ConfigError("ORDER", f"--batch.order balanced finds no classes: {GIVE_LABELS}")
    labels = _read_numbers(labels, num_samples, "labels=", "biu", GIVE_LABELS).long()
    kept = kept[labels[kept] >= 0]
    if not len(kept):
        raise ConfigError(
            "ORDER", f"--batch.order balanced finds no label from 0 on: {GIVE_LABELS}"
        )
    found, counts = labels[kept].unique(return_counts=True)
    by_class = kept[labels[kept].argsort(stable=True)].split(counts.tolist())
    classes = dict(zip(found.tolist(), by_class, strict=True))
    quota = len(kept) // len(classes)

    def draw(*, seed: int, epoch: int) -> Tensor:
        ids = [
            _from_rounds(of_class, epoch * quota, quota, fold_in(seed, label))
            for label, of_class in classes.items()
        ]
        return number_repetitions(_shuffled(torch.cat(ids), seed=seed, epoch=epoch), num_samples)

    return SampleOrder(kept, quota * len(classes), draw, _hash(kept, labels[kept]))


def _hash(*parts: Ids) -> str:
    return hash_value(list(parts)).hex()


def number_repetitions(ids: Tensor, dataset_size: int) -> Tensor:
    """Return the drawn ids of `ids` [M]."""
    by_id = ids.argsort(stable=True)
    _, counts = ids[by_id].unique_consecutive(return_counts=True)
    first_places = (counts.cumsum(0) - counts).repeat_interleave(counts)
    drawn = ids.clone()
    drawn[by_id] += (torch.arange(len(ids)) - first_places) * dataset_size
    return drawn


def _from_rounds(ids: Tensor, first: int, count: int, key: int) -> Tensor:
    """Return `count` of `ids` [M] from place `first` of an endless row of permutations on."""
    rounds = range(first // len(ids), (first + count - 1) // len(ids) + 1)
    row = torch.cat([ids[epoch_permutation(len(ids), seed=key, epoch=number)] for number in rounds])
    start = first - rounds.start * len(ids)
    return row[start : start + count]


def _read_numbers(values: Any, num_samples: int, name: str, kinds: str, fix: str) -> Tensor:
    """Return `values` [num_samples] if numpy's kind of their dtype is one of `kinds`."""
    try:
        array = np.asarray(values)
    except Exception as error:  # lists of different lengths, a tensor on a GPU
        raise ConfigError("ORDER", f"{name} cannot be read ({error}): {fix}") from error
    if array.shape != (num_samples,):
        raise ConfigError(
            "ORDER",
            f"{name} has the shape {list(array.shape)} for {counted(num_samples, 'sample')}: "
            f"give one number for each sample, [{num_samples}]",
        )
    if array.dtype.kind not in kinds:
        raise ConfigError("ORDER", f"{name} are {array.dtype}: {fix}")
    return torch.tensor(array)


def _without(ids: range, path: Path) -> Ids:
    """Return `ids` without those that the file lists, one in a line; `#` begins a comment."""
    try:
        lines = [
            line.partition("#")[0].strip()
            for line in path.read_text(encoding="utf-8-sig").splitlines()
        ]
        listed = torch.tensor([int(line) for line in lines if line], dtype=torch.int64)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "ORDER",
            f"--leave-out {path} cannot be read ({error}): "
            "give a file with one sample id in each line",
        ) from None
    unknown = listed[(listed < 0) | (listed >= len(ids))]
    if len(unknown):
        raise ConfigError(
            "ORDER",
            f"--leave-out {path} lists sample {int(unknown[0])}, the ids are 0 to {len(ids) - 1}: "
            "correct the file",
        )
    is_kept = torch.ones(len(ids), dtype=torch.bool)
    is_kept[listed] = False
    if not is_kept.any():
        raise ConfigError("ORDER", f"--leave-out {path} lists all samples: shorten it")
    return is_kept.nonzero()[:, 0] if len(listed) else ids


def labels_of(dataset: Any, columns: tuple[str, str] | None = None) -> Any:
    """Return the labels that a dataset has at hand, without a read of its samples, or None.

    They are the second of the `columns` of a table, its `targets` or `labels`, as in torchvision's,
    the last tensor of a TensorDataset, or those of the samples of a Subset.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset
        labels = labels_of(dataset.dataset, columns)
        return None if labels is None else np.asarray(labels)[np.asarray(dataset.indices)]
    if columns is not None:
        return dataset[columns[1]]
    named = (getattr(dataset, name, None) for name in ("targets", "labels"))
    found = (*named, *getattr(dataset, "tensors", ())[-1:])
    return next((labels for labels in found if labels is not None), None)
