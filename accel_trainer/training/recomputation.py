"""Buffers of a model that recomputes a forward in its backward, as checkpointed layers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core.buffers import BufferCopy, buffer_places, buffers_at


class Recomputation:
    """Puts back buffers, such as running statistics, that a recomputed forward changes again.

    `copies` are of all buffers before the first backward, and then of the ones that both the
    forward and the backward have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._unknown = buffer_places(model)
        self.copies = [BufferCopy([place]) for place in self._unknown]

    @contextmanager
    def undone(self, before: Sequence[Tensor]) -> Iterator[None]:
        """Run the backward in the block; `before` are the buffers before its forward.

        **Host sync** the first time.
        """
        for copied in self.copies:
            copied.take()
        yield
        if self._unknown:
            rows = zip(before, self.copies, buffers_at(self._unknown), strict=True)
            self.copies = [
                copied
                for old, copied, now in rows
                if not (torch.equal(old, copied.tensors[0]) or torch.equal(copied.tensors[0], now))
            ]
            self._unknown = []
        for copied in self.copies:
            copied.put_back()
