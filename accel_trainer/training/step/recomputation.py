"""Buffers of a model that recomputes a forward in its backward, as checkpointed layers do."""

from __future__ import annotations

import torch

from ...core.buffers import BufferCopy, StepBuffers


class Recomputation:
    """Puts back buffers, such as running statistics, that a recomputed forward changes again.

    `copies` are of all buffers before the first backward, and then of the ones that both the
    forward and the backward have changed.
    """

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._is_unknown = True
        self.copies = [BufferCopy([place]) for place in buffers.places]

    def begin_backward(self) -> None:
        """Copy the buffers before the backward of a micro-batch."""
        for copied in self.copies:
            copied.take()

    def end_backward(self) -> None:
        """Put them back. **Host sync** the first time."""
        if self._is_unknown:
            rows = zip(self._buffers.saved, self.copies, self._buffers.current, strict=True)
            self.copies = [
                copied
                for old, copied, now in rows
                if not (torch.equal(old, copied.tensors[0]) or torch.equal(copied.tensors[0], now))
            ]
            self._is_unknown = False
        for copied in self.copies:
            copied.put_back()
