"""Networks that step in turn: every process has the whole model, and averages what a turn trains.

DDP waits for the same parameters in each step, and copies buffers between two forwards of a step,
which the backward then finds changed (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...core.types import StepSums
from ...distributed.collectives import exchange_flattened
from .base import Strategy


class TurnStrategy(Strategy):
    """Averages the gradients after the last backward of a step, all at once.

    Their order is that of the model's parameters, so that a resumed run rounds alike. One process
    needs no strategy of its own for turns.
    """

    @torch.no_grad()
    def finish(self, micro_sums: Sequence[StepSums]) -> tuple[StepSums, Tensor | None]:
        """Average the gradients over the processes, and return the sums of this one.

        **Collective. Host sync** if a parameter that has the turn got no gradient on this process.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        means = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        # The share of the processes on which each parameter got a gradient.
        shares = micro_sums[0].loss.new_tensor([each.grad is not None for each in trained])
        exchange_flattened([*means, shares], partial(self.accelerator.reduce, reduction="mean"))
        for parameter, mean, share in zip(trained, means, shares, strict=True):
            if parameter.grad is None and share:
                parameter.grad = mean
        return super().finish(micro_sums)
