"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

from ..core.buffers import NOTHING, are_same, buffer_places, buffers_at
from ..core.shards import is_shard, local_part


class Ema:
    """Keeps `model`, a copy in evaluation mode whose weights are averages of those of `source`.

    In each update, average = decay * average + (1 - decay) * source. The decay is
    (1 + step) / (10 + step) until that reaches `decay`: the random initial weights fade, as in
    Tensorflow's ExponentialMovingAverage. torch's AveragedModel would sync the host in each update.

    `copied` is a copy of `source`. If the weights are sharded, both are sharded in the same way.
    """

    def __init__(self, source: nn.Module, copied: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.model = copied.eval().requires_grad_(False)
        self._parameters = list(zip(self.model.parameters(), source.parameters(), strict=True))
        self._has_shards = any(is_shard(average) for average, _ in self._parameters)
        self._average_places = list(buffer_places(self.model).values())
        self._source_places = list(buffer_places(source).values())
        self._look_up()

    @torch.no_grad()
    def update(self, *, optimizer_step: int) -> None:
        """Update the average with the weights after step `optimizer_step`; the first step is 1."""
        decay = min(self.decay, (1 + optimizer_step) / (10 + optimizer_step))
        buffers = buffers_at([*self._average_places, *self._source_places])
        # A forward may have assigned a new tensor to a buffer.
        if self._has_shards or not are_same(buffers, self._buffers):
            self._look_up()
        averages, sources = zip(*self._averaged, strict=True)
        torch._foreach_lerp_(averages, sources, 1 - decay)
        if self._copied:
            averages, sources = zip(*self._copied, strict=True)
            torch._foreach_copy_(averages, sources)

    def _look_up(self) -> None:
        """Collect the tensors that the model and its average have now.

        A buffer whose shape or dtype differs from its average was replaced: the average becomes a
        copy of it.
        """
        averages = buffers_at(self._average_places)
        sources = buffers_at(self._source_places)
        for (owner, name), average, source in zip(
            self._average_places, averages, sources, strict=True
        ):
            if (average.shape, average.dtype) != (source.shape, source.dtype):
                setattr(owner, name, None if source is NOTHING else source.detach().clone())
        averages = buffers_at(self._average_places)
        self._buffers = averages + sources
        pairs = [(local_part(average), local_part(source)) for average, source in self._parameters]
        pairs += zip(averages, sources, strict=True)
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]
