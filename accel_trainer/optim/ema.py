"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

from ..core.buffers import NOTHING, are_same, buffer_places, buffers_at
from ..core.shards import is_shard, local_part


class Ema:
    """Keeps `model`, an averaged copy in evaluation mode: average = decay * average + (1 - decay) * source.

    The decay is (1 + step) / (10 + step) until that reaches `decay`: the random initial weights
    fade, as in Tensorflow's ExponentialMovingAverage. torch's AveragedModel would sync the host in
    each update.

    `copied` is a copy of `source`, whose weights may be sharded in the same way.
    """

    def __init__(self, source: nn.Module, copied: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.model = copied.eval().requires_grad_(False)
        self._parameters = list(zip(self.model.parameters(), source.parameters(), strict=True))
        self._has_shards = any(is_shard(average) for average, _ in self._parameters)
        averaged, sources = (list(buffer_places(each).values()) for each in (self.model, source))
        self._places, self._num_buffers = averaged + sources, len(sources)
        self._look_up()

    @torch.no_grad()
    def update(self, *, optimizer_step: int) -> None:
        """Update the average with the weights after step `optimizer_step`; the first step is 1."""
        decay = min(self.decay, (1 + optimizer_step) / (10 + optimizer_step))
        if self._has_shards or not are_same(buffers_at(self._places), self._buffers):
            self._look_up()
        torch._foreach_lerp_(self._averaged, self._sources, 1 - decay)
        if self._counted:
            torch._foreach_copy_(self._counted, self._counters)

    def _look_up(self) -> None:
        """Find the tensors of now.

        Where a buffer has another shape than its average, it was replaced and is copied.
        """
        buffers = buffers_at(self._places)
        for (owner, name), average, source in zip(
            self._places, buffers, buffers[self._num_buffers :], strict=False
        ):
            if (average.shape, average.dtype) != (source.shape, source.dtype):
                setattr(owner, name, None if source is NOTHING else source.detach().clone())
        self._buffers = buffers_at(self._places)
        pairs = [(local_part(average), local_part(source)) for average, source in self._parameters]
        pairs += zip(self._buffers, self._buffers[self._num_buffers :], strict=False)
        self._averaged = [average for average, _ in pairs if average.is_floating_point()]
        self._sources = [source for _, source in pairs if source.is_floating_point()]
        self._counted = [average for average, _ in pairs if not average.is_floating_point()]
        self._counters = [source for _, source in pairs if not source.is_floating_point()]
