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
_ID, _STEP, _MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


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
            hasher.update(f"{path} {whole.dtype} {[*whole.shape]}\n".encode())
            hasher.update(read_only_bytes(whole))
        else:
            hasher.update(f"{path} {leaf!r}\n".encode())
    return hasher.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of the elements in logical order, as uint8 [N] on the same device.

    It is a view, unless the elements lie in memory otherwise, such as once for all of them.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # Not `contiguous`, which leaves the stride of a single element.
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def read_only_bytes(tensor: Tensor) -> memoryview:
    """Return `bytes_of(tensor)` in host memory.

    Unlike `numpy`, after which torch never resizes the memory of the tensor, this leaves FSDP able
    to free a gathered weight.
    """
    return np.from_dlpack(bytes_of(tensor).cpu()).data


def sum_of_samples(parts: Sequence[tuple[int, Tensor]]) -> int:
    """Return a sum of 64 bits that identifies the samples of some steps, in whatever order.

    **Host sync.** A part is a step and the ids int64 [B] of a micro-batch. The sums of several
    calls and processes add up modulo 2**64.
    """
    steps, batches = zip(*parts, strict=True)
    mixed = torch.cat(batches).cpu().numpy().view(np.uint64) * _ID
    keys = np.array(steps, np.uint64) * _STEP
    mixed += keys.repeat([ids.numel() for ids in batches])
    # In place: new memory costs more than the arithmetic.
    mixed ^= mixed >> 32
    mixed *= _MIX
    mixed ^= mixed >> 32
    return int(mixed.view(np.int64).sum())


def samples_digest(total: int) -> str:
    """Return the digest of samples, from the sum over all processes."""
    return f"{total % 2**64:016x}"


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
