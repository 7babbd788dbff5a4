"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Keeps `model`, an averaged copy in evaluation mode: average = decay * average + (1 - decay) * source.

    The decay is (1 + step) / (10 + step) until that reaches `decay`: the random initial weights fade, as in
    Tensorflow's ExponentialMovingAverage. torch's AveragedModel would sync the host in each update.
    """

    def __init__(self, source: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(source).eval().requires_grad_(False)
        self._averaged, self._counted = _tensors(self.model, is_float=True), _tensors(self.model, is_float=False)
        self._sources, self._counters = _tensors(source, is_float=True), _tensors(source, is_float=False)

    @torch.no_grad()
    def update(self, *, optimizer_step: int) -> None:
        """Update the average with the weights after step `optimizer_step`; the first step is 1."""
        decay = min(self.decay, (1 + optimizer_step) / (10 + optimizer_step))
        torch._foreach_lerp_(self._averaged, self._sources, 1 - decay)
        if self._counted:
            torch._foreach_copy_(self._counted, self._counters)


def _tensors(model: nn.Module, *, is_float: bool) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point() == is_float]
