"""Splits a dataset by a hash of its samples' names: adding a sample moves no other one.

The names are a sequence of texts or numbers, such as files, or the number of samples, whose names
are then their positions. Samples of one name, such as the photos of a patient, stay together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError


def split(ids: Any, fractions: Sequence[float], seed: int = 0) -> tuple[Tensor, ...]:
    """Return the positions of the samples of each part, int64 in their order.

    A part has its share of `fractions` of the names only approximately, and may be empty.

    Raises:
        ConfigError: `fractions` are not above 0, or do not add up to 1; `ids` are samples.
    """
    if (
        np.ndim(fractions) != 1
        or min(fractions, default=0) <= 0
        or not math.isclose(sum(fractions), 1)
    ):
        raise ConfigError("CONFIG", f"fractions={fractions}: give some above 0 that add up to 1")
    names = range(ids) if isinstance(ids, int) else ids
    if isinstance(next(iter(names), None), tuple | Mapping):
        raise ConfigError("CONFIG", "split got samples: give len(dataset), or a name for each one")
    hashes = [sha256(f"{seed} {name}".encode()).digest() for name in names]
    draws = [int.from_bytes(each[:6], "big") / 2**48 for each in hashes]
    parts = np.digitize(draws, np.cumsum(fractions)[:-1])
    return tuple(torch.tensor(np.flatnonzero(parts == part)) for part in range(len(fractions)))


def fold(ids: Any, k: int, number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions of the training and the validation samples of fold `number` of `k`.

    They are int64 in their order. Each sample is for validation in one of the folds, which are 0 to
    `k - 1`.

    Raises:
        ConfigError: there are fewer than two folds, or there is no such number.
    """
    if k < 2 or number not in range(k):
        raise ConfigError(
            "CONFIG",
            f"there is no fold {number} of {k}: give a number from 0 to k - 1, and k of 2 or more",
        )
    parts = [*split(ids, [1 / k] * k, seed)]
    validation = parts.pop(number)
    return torch.cat(parts).sort().values, validation
