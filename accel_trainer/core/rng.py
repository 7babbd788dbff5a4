"""All randomness.

Each draw is a pure function of named integers: there is no generator state to save or to advance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

N = TypeVar("N", int, Tensor)

# The golden-ratio increment and the two multipliers of "lowbias32" (C. Wellons, "Prospecting for
# hash functions", 2018: bias 0.17, no 32-bit multiply-xorshift of this length known to be better).
_INCREMENT = 0x9E3779B9
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_MASK = 0xFFFFFFFF
_CPU = torch.device("cpu")
_python = random.seed.__self__  # type: ignore[attr-defined]  # the generator of Python's module
_seed_python = super(random.Random, _python).seed
# Keys larger than any process index, which is the key of a training forward.
_EVALUATION = 0x6576616C
UPDATE = 0x75706474


def mix(x: N) -> N:
    """Hash 32-bit values: Python integers, or int64 [*].

    Products of tensors overflow, but their low 32 bits are right.
    """
    x = ((x ^ (x >> 16)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 16)


def fold_in(*keys: int, start: int = _INCREMENT) -> int:
    """Hash any integers into one key in [0, 2**32).

    `start` is the key of preceding integers: `fold_in(b, start=fold_in(a)) == fold_in(a, b)`.
    """
    key = start
    for value in keys:
        while True:  # 32 bits at a time, so that large seeds do not collide
            key = mix((key ^ (value & _MASK)) + _INCREMENT & _MASK)
            value >>= 32
            if value in (0, -1):
                break
    return key


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch: a permutation, int64 [num_samples] on the CPU."""
    generator = torch.Generator().manual_seed(fold_in(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def seed_evaluation(seed: int, first_sample: int, device: torch.device) -> None:
    """Seed Python, numpy and torch for the evaluation batch that begins with `first_sample`."""
    seed_generators(fold_in(seed, _EVALUATION, first_sample), device)


def seed_generators(key: int, device: torch.device = _CPU) -> None:
    """Seed the global generators of Python, numpy and torch, on the CPU and on `device`.

    `torch.manual_seed` would seed every device, which takes 90 us.
    """
    # As `random.seed` does, which takes as long again to look at what it got.
    _seed_python(key)
    _python.gauss_next = None
    np.random.seed(key)
    torch.default_generator.manual_seed(key)
    # Compared first: each access to `type` builds a string, a measurable part of a tiny step.
    if device != _CPU and device.type != "cpu":
        torch.get_device_module(device).manual_seed(key)


def generator_states() -> tuple[object, ...]:
    """Return the states of the global generators of Python, numpy and torch on the CPU."""
    return str(random.getstate()), np.random.get_state(), torch.get_rng_state()


@contextmanager
def preserved_generators(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and `device` after the block."""
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
