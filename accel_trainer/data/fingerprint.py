"""Detects changed data by a hash of some samples, at a cost that does not grow with the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ..core.logger import logger

NUM_HASHED = 32
NUM_REPEATS = 8
SAMPLED = "sampled:"


def fingerprint_samples(
    read: Callable[[int], Any],
    num_samples: int,
    *,
    name: str = "the data",
    disturb: Callable[[int], object] = int,
    read_state: Callable[[], bytes] = bytes,
) -> str:
    """Return a prefix and the SHA-256 of the number of samples and `NUM_HASHED` evenly spaced ones.

    `read(index)` returns a sample that `hash_value` accepts. Sample 0 is read several times, and
    `disturb(number)` is called after each; another sample is read twice. `read_state` returns what
    a read leaves, such as the state of generators: an augmented sample that is kept draws no random
    numbers when it is read again.

    Returns an empty string, after a warning, if a sample cannot be hashed, or if it or the state
    differs when it is read again.
    """
    num_hashed = min(NUM_HASHED, num_samples)
    others = [position * num_samples // num_hashed for position in range(1, num_hashed)]
    marks: dict[int, tuple[bytes, bytes]] = {}
    # An augmentation of its own leaves a sample as it is in some of the reads.
    for number, index in enumerate((*[0] * (NUM_REPEATS - 2), *others, 0, *others[-1:])):
        sample = read(index)
        try:
            mark = hash_value(sample), read_state()
        except Exception as error:  # Pickling an object may raise anything.
            return _without_hash(f"a sample cannot be hashed ({type(error).__name__}: {error})")
        # The very first read may set something up.
        if number and marks.setdefault(index, mark) != mark:
            return _without_hash(
                f"[UNSAVED_STATE] sample {index} of {name} differs when it is read again with the "
                "same seed, so a resumed run would train on different samples: draw from the "
                "global generators of torch, numpy or Python, and do not change or keep a drawn "
                "sample"
            )
        if not index:
            disturb(number + 1)
    hashes = b"".join(hashed for hashed, _ in marks.values())
    return SAMPLED + hashlib.sha256(str(num_samples).encode() + hashes).hexdigest()


def _without_hash(reason: str) -> str:
    logger.warning("%s; changed data is noticed only by the number of samples", reason)
    return ""


def join_fingerprints(parts: Sequence[str]) -> str:
    """Return the fingerprint of several sets of samples, empty if that of any set is empty."""
    if not all(parts):
        return ""
    return SAMPLED + hashlib.sha256("".join(parts).encode()).hexdigest()


def is_same_data(stored: str, now: str) -> bool:
    """Return whether the data may be the same: the fingerprints are, or one is missing."""
    return stored == now or "" in (stored, now)


def hash_value(value: Any) -> bytes:
    """Return the SHA-256 of nested tensors, arrays, pictures, text, numbers and objects.

    Of an object, what pickle would store is hashed. Raises any error of an object that cannot be
    pickled.
    """
    digest = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        # Not `contiguous`, which leaves the strides of a single number.
        data = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{data.dtype} {list(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(hash_value(key) + hash_value(value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            digest.update(hash_value(item))
    elif hasattr(value, "tobytes") and not _holds_objects(value):  # An array or a picture.
        shape = getattr(value, "shape", None) or getattr(value, "size", None)
        digest.update(f"{shape} {getattr(value, 'dtype', None)}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(repr(value).encode())
    else:
        digest.update(_hash_object(value))
    return digest.digest()


def _holds_objects(value: Any) -> bool:
    """Return whether the bytes of an array are the addresses of objects."""
    return bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def _hash_object(value: Any) -> bytes:
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}".encode()
    if isinstance(value, set | frozenset):  # The order differs between processes.
        return b"".join(sorted(hash_value(item) for item in value))
    if _holds_objects(value):
        return hash_value([value.shape, value.tolist()])
    parts = value.__reduce_ex__(4)
    if not isinstance(parts, str):
        parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return hash_value(parts)
