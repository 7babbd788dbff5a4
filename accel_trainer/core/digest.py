"""Digests of a run's state: 16 hexadecimal digits that are equal if all bits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from .shards import is_shard

# Odd numbers without a pattern in their bits: those of SplitMix64 (Steele, Lea and Flood, 2014).
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_HALF = np.uint64(32)


def digest_of(state: Any) -> str:
    """Return the XXH3 hash (64 bits) of nested tensors and plain values, in order of their paths.

    **Host sync.** **Collective** with shards.

    Each path is followed by the dtype, the shape and the bytes of its tensor in logical order, or
    by the `repr` of its value. So the digest does not depend on memory formats, devices and shards.
    """
    hasher = xxhash.xxh3_64()
    for path, leaf in sorted(flatten(state).items()):
        if isinstance(leaf, Tensor):
            whole = leaf.full_tensor() if is_shard(leaf) else leaf
            flat = whole.detach().to("cpu").reshape(-1)
            hasher.update(f"{path} {flat.dtype} {[*whole.shape]}\n".encode())
            hasher.update(flat.view(torch.uint8).numpy().data)
        else:
            hasher.update(f"{path} {leaf!r}\n".encode())
    return hasher.hexdigest()


def sums_of_samples(parts: Sequence[tuple[int, Tensor]]) -> tuple[float, float]:
    """Return two sums that identify the samples of some steps, in whatever order. **Host sync.**

    A part is a step and the ids int64 [B] of a micro-batch. The sums of several calls and processes
    add up without rounding.
    """
    steps = np.array([step for step, _ in parts], np.uint64)
    ids = torch.cat([ids for _, ids in parts]).cpu().numpy().view(np.uint64)
    step_of_each = steps.repeat([len(ids) for _, ids in parts])
    mixed = ids * _FACTORS[0] + step_of_each * _FACTORS[1]  # modulo 2**64
    mixed = (mixed ^ (mixed >> _HALF)) * _FACTORS[2]
    total = int((mixed ^ (mixed >> _HALF)).sum())
    return float(total % 2**32), float(total >> 32)


def samples_digest(low: float, high: float) -> str:
    """Return the digest of samples, from the two sums over all processes."""
    low, high = carry(low, high)
    return f"{int(high):08x}{int(low):08x}"


def carry(low: float, high: float) -> tuple[float, float]:
    """Return the two sums of samples with 32 bits each, however the samples were split."""
    carried, low = divmod(low, 2.0**32)
    return low, (high + carried) % 2**32


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of `value` by path, such as `state[0].exp_avg`.

    An empty container is a leaf.
    """
    children = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if not isinstance(children, Mapping) or not children:
        return {path: value}
    found: dict[str, Any] = {}
    for key, child in children.items():
        step = f"{'.' * bool(path)}{key}" if isinstance(key, str) else f"[{key!r}]"
        found |= flatten(child, path + step)
    return found
