"""A model's buffers, looked up by name at each use: a forward may assign one, as in `self.mean = ...`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""The module that has a buffer, and its name there."""

NOTHING = torch.empty(0)
"""What a buffer counts as while it is None."""


def buffer_places(model: nn.Module) -> dict[str, Place]:
    """Return the places of all buffers by full name."""
    paths = [(name, *name.rpartition(".")) for name, _ in model.named_buffers()]
    return {name: (model.get_submodule(path), short) for name, path, _, short in paths}


def buffers_at(places: Sequence[Place]) -> list[Tensor]:
    """Return the tensors that are at `places` now."""
    # torch's public ways (getattr, get_buffer, named_buffers) take 15 to 45 times as long: 0.2 ms a
    # step with 20 norms.
    return [
        NOTHING if (buffer := owner._buffers[name]) is None else buffer for owner, name in places
    ]


def are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists have the same objects."""
    return all(map(is_, tensors, others))


class BufferCopy:
    """A copy of the buffers at `places`, in memory that is allocated once."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._allocate(buffers_at(places))
        self.take()

    def take(self) -> None:
        """Copy the buffers of now."""
        if not self._places:
            return
        buffers = buffers_at(self._places)
        if not are_same(buffers, self._buffers):
            self._allocate(buffers)
        for live, copies in self._by_dtype.values():
            torch._foreach_copy_(copies, live)

    def put_back(self) -> None:
        """Let the buffers be as they were at the last `take`; one that was assigned since is replaced by a copy."""
        now = buffers_at(self._places)
        for (owner, name), buffer, before, copied in zip(
            self._places, now, self._buffers, self.tensors, strict=True
        ):
            if buffer is before:
                buffer.detach().copy_(copied)
            else:
                setattr(owner, name, None if before is NOTHING else copied.clone())

    def _allocate(self, buffers: list[Tensor]) -> None:
        self._buffers, self.tensors = buffers, [torch.empty_like(buffer) for buffer in buffers]
        # By dtype: on CUDA, one kernel copies all tensors of one.
        self._by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, copied in zip(buffers, self.tensors, strict=True):
            live, copies = self._by_dtype.setdefault(buffer.dtype, ([], []))
            live.append(buffer.detach())
            copies.append(copied)


class BufferHistory:
    """Copies of the buffers of `model` from before this step and the one before, which may yet turn out to be bad."""

    def __init__(self, model: nn.Module) -> None:
        places = list(buffer_places(model).values())
        self._copies = deque([BufferCopy(places), BufferCopy(places)])  # the newer first

    @property
    def saved(self) -> list[Tensor]:
        """The copies from before this step."""
        return self._copies[0].tensors

    def save(self) -> None:
        """Copy the buffers before the forwards of a step."""
        self._copies.rotate()
        self._copies[0].take()

    def restore(self, *, steps_ago: int = 0) -> None:
        """Let the buffers be as before this step, or before the one before: a skipped step leaves no trace."""
        self._copies[steps_ago].put_back()
