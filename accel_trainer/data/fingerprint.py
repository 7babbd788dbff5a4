"""Whether the data of a run has changed: a hash of some samples, whose cost does not grow with their number."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

NUM_HASHED = 32
SAMPLED = "sampled:"


def fingerprint_samples(read: Callable[[int], Any], num_samples: int) -> str:
    """Return `sampled:` and the SHA-256 of the number of samples and of `NUM_HASHED` evenly spaced ones.

    `read(index)` returns a sample: tensors, arrays, pictures, text and numbers, nested in lists, tuples and dicts.
    Returns an empty string, after a warning, if the first one differs when it is read again.
    """
    if hash_value(read(0)) != hash_value(read(0)):
        _logger.warning(
            "sample 0 of the data differs each time it is read, so a resume can detect changed data only by the number "
            "of samples"
        )
        return ""
    digest = hashlib.sha256(str(num_samples).encode())
    for position in range(min(NUM_HASHED, num_samples)):
        digest.update(hash_value(read(position * num_samples // min(NUM_HASHED, num_samples))))
    return f"{SAMPLED}{digest.hexdigest()}"


def describe_fingerprint(fingerprint: str) -> str:
    """Return a description of what is compared when a run is resumed."""
    if not fingerprint:
        return "only their number"
    return "a hash of some samples" if fingerprint.startswith(SAMPLED) else "a hash of all samples"


def hash_value(value: Any) -> bytes:
    """Return the SHA-256 of tensors, arrays, pictures, text and numbers, nested in lists, tuples and dicts."""
    digest = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        digest.update(f"{data.dtype} {list(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(hash_value(key) + hash_value(value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            digest.update(hash_value(item))
    elif hasattr(value, "tobytes"):  # an array or a picture
        shape = getattr(value, "shape", None) or getattr(value, "size", None)
        digest.update(f"{shape} {getattr(value, 'dtype', None)}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(repr(value).encode())
    return digest.digest()
