"""A model's buffers, looked up by name at each use.

A forward may replace one by assignment, as in `self.mean = ...`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""The module that has a buffer, and its name there."""

NOTHING = torch.empty(0)
"""Stands for a buffer that is None."""


def buffer_places(model: nn.Module) -> list[Place]:
    """Return the places of all buffers, in the order of `named_buffers`."""
    places = []
    for name, _ in model.named_buffers():
        path, _, short_name = name.rpartition(".")
        places.append((model.get_submodule(path), short_name))
    return places


def buffers_at(places: Sequence[Place]) -> list[Tensor]:
    """Return the tensors that are at `places` now."""
    # torch's public ways (getattr, get_buffer, named_buffers) take 15 to 45 times as long: 0.2 ms
    # per step for 20 norms.
    return [
        NOTHING if (buffer := owner._buffers[name]) is None else buffer for owner, name in places
    ]


def are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether two lists of equal length hold the same objects."""
    return all(map(is_, tensors, others))


class BufferCopy:
    """A copy of the buffers at `places`, in memory that is allocated once."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._allocate(buffers_at(places))
        self.take()

    def take(self) -> None:
        """Copy the current buffers."""
        buffers = buffers_at(self._places)
        if not are_same(buffers, self._buffers):
            self._allocate(buffers)
        for live, copies in self._by_dtype.values():
            torch._foreach_copy_(copies, live)

    def put_back(self) -> None:
        """Restore the buffers' values at the last `take`.

        A buffer that was assigned since then is replaced by a copy.
        """
        current = buffers_at(self._places)
        rows = zip(self._places, current, self._buffers, self.tensors, strict=True)
        for (owner, name), buffer, before, copied in rows:
            if buffer is before:
                buffer.detach().copy_(copied)
            else:
                setattr(owner, name, None if before is NOTHING else copied.clone())

    def _allocate(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self.tensors = [torch.empty_like(buffer) for buffer in buffers]
        # On CUDA, one kernel copies all tensors of the same dtype.
        self._by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, copied in zip(buffers, self.tensors, strict=True):
            live, copies = self._by_dtype.setdefault(buffer.dtype, ([], []))
            live.append(buffer.detach())
            copies.append(copied)


class StepBuffers:
    """A model's buffers, and copies from before the current step and from before the previous one.

    Either step may still turn out to be bad.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places = buffer_places(model)
        # The newer one is first.
        self._copies = deque([BufferCopy(self.places), BufferCopy(self.places)])

    @property
    def current(self) -> list[Tensor]:
        """The buffers as they are now."""
        return buffers_at(self.places)

    @property
    def saved(self) -> list[Tensor]:
        """The copies from before the current step."""
        return self._copies[0].tensors

    def save(self) -> None:
        """Copy the buffers before the forwards of a step."""
        if self.places:  # a step of a tiny model without buffers is 2 % shorter
            self._copies.rotate()
            self._copies[0].take()

    def copy_current(self) -> BufferCopy:
        """Return a further copy of the buffers, as they are now."""
        return BufferCopy(self.places)

    def restore(self, *, steps_ago: int = 0) -> None:
        """Restore the buffers from before the current step, or (`steps_ago=1`) the previous one.

        A skipped step then leaves no trace.
        """
        self._copies[steps_ago].put_back()
