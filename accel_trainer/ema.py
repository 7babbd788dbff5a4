"""An exponential moving average of a model's parameters and buffers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Keeps `model`, an averaged copy in evaluation mode: average = decay * average + (1 - decay) * source.

    The decay ramps up as (1 + step) / (10 + step) until it reaches `decay`, so that the random
    initial weights fade (Tensorflow's ExponentialMovingAverage). It is a pure function of the step.

    torch's own AveragedModel reads a counter on the host in each update, which would stall a GPU.
    """

    def __init__(self, source: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(source).eval().requires_grad_(False)
        pairs = list(zip(_tensors(self.model), _tensors(source), strict=True))
        self._averaged = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
        self._copied = [(mine, theirs) for mine, theirs in pairs if not mine.is_floating_point()]

    @torch.no_grad()
    def update(self, *, optimizer_step: int) -> None:
        """Take the source's weights after step `optimizer_step` (the first is 1) into the average."""
        decay = min(self.decay, (1 + optimizer_step) / (10 + optimizer_step))
        torch._foreach_lerp_([mine for mine, _ in self._averaged], [theirs for _, theirs in self._averaged], 1 - decay)
        for mine, theirs in self._copied:
            mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
