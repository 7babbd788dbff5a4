"""Copies of the state in host memory, to be written while training changes the originals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..distributed.streams import has_streams, record_events
from .serialization import Encoded


class Snapshot:
    """Buffers in host memory for a copy of the state.

    They are allocated once: reusing them more than halves the time of a copy. For tensors on a
    device with streams they are pinned, and the copy does not block the host.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, pieces: Mapping[str, Encoded]) -> tuple[dict[str, Encoded], Callable[[], None]]:
        """Return a copy of `pieces`, and a function that waits until the copy is complete.

        The next `take` overwrites the copy.
        """
        buffers: dict[tuple[str, str], Tensor] = {}
        copies = {}
        devices: set[torch.device] = set()
        for name, encoded in pieces.items():
            for key, tensor in encoded.tensors.items():
                is_async = has_streams(tensor.device)
                buffer = self._buffers.get((name, key))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_async)
                buffer.copy_(tensor.detach(), non_blocking=is_async)
                buffers[name, key] = buffer
                devices.add(tensor.device)
            copies[name] = replace(
                encoded, tensors={key: buffers[name, key] for key in encoded.tensors}
            )
        self._buffers = buffers
        # Later kernels of a stream run after the copies, so training cannot change a tensor that is
        # still being copied.
        return copies, record_events(*devices)
