"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..distributed.fsdp import local_part


class Ema:
    """Keeps `model`, an averaged copy in evaluation mode: average = decay * average + (1 - decay) * source.

    The decay is (1 + step) / (10 + step) until that reaches `decay`: the random initial weights fade, as in
    Tensorflow's ExponentialMovingAverage. torch's AveragedModel would sync the host in each update.

    Create it after accelerate's `prepare`, which moves `source` once more: `.to("cpu:0")` replaces its buffers (torch
    2.13), to which the average refers. Shards cannot be copied: `copied` is then a copy that was sharded likewise.
    """

    def __init__(self, source: nn.Module, *, decay: float, copied: nn.Module | None = None) -> None:
        self.decay = decay
        self.model = (copied or copy.deepcopy(source)).eval().requires_grad_(False)
        self._averaged, self._counted = _tensors(self.model, is_float=True), _tensors(self.model, is_float=False)
        self._sources, self._counters = _tensors(source, is_float=True), _tensors(source, is_float=False)

    @torch.no_grad()
    def update(self, *, optimizer_step: int) -> None:
        """Update the average with the weights after step `optimizer_step`; the first step is 1."""
        decay = min(self.decay, (1 + optimizer_step) / (10 + optimizer_step))
        averaged, sources = ([local_part(tensor) for tensor in each] for each in (self._averaged, self._sources))
        torch._foreach_lerp_(averaged, sources, 1 - decay)
        if self._counted:
            torch._foreach_copy_(self._counted, self._counters)


def _tensors(model: nn.Module, *, is_float: bool) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point() == is_float]
