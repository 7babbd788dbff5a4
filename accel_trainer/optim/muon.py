"""Muon: orthogonalised momentum for filters, and SGD for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

# The quintic of K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
# (kellerjordan.github.io/posts/muon): the steepest at 0 that keeps large singular values within 0.7
# to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3  # as many as airbench94_muon makes; five come closer and train no better there


class Muon(SGD):
    """SGD, in which groups with a `filter_momentum` step along their orthogonalised momentum.

    Filters [out, in, ...] are taken as a matrix [out, in * ...]. As in airbench94_muon, their
    momentum is Nesterov's and their norm is kept at sqrt(out); filters of norm 0 keep it until the
    first step. Give such groups a `momentum` and `weight_decay` of 0. Parameters must not be
    sharded.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        With `found_inf` and `grad_scale`, as GradScaler sets them, like torch's fused SGD.
        """
        with torch.no_grad():
            for group in self.param_groups:
                if "filter_momentum" in group:
                    for filters in group["params"]:
                        if filters.grad is not None:
                            self._orthogonalize(filters, group["filter_momentum"])
        return super().step(closure)

    def _orthogonalize(self, filters: Tensor, momentum: float) -> None:
        """Replace the gradient by the step for SGD without momentum, in place: fused kernels need its layout."""
        gradient, state = filters.grad, self.state[filters]
        assert gradient is not None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        before = (
            state["momentum_buffer"] if "momentum_buffer" in state else torch.zeros_like(filters)
        )
        unscaled = gradient if scale is None else gradient / scale
        buffer = torch.add(unscaled, before, alpha=momentum)
        direction = orthogonalized((unscaled + momentum * buffer).flatten(1)).view_as(filters)
        length = len(filters) ** 0.5 / filters.norm()
        # filters that are 0 have no direction to keep
        length = torch.where(length.isfinite(), length, 1.0)
        # the step may be skipped: change nothing then, without a host sync
        if found_inf is not None:
            buffer = torch.where(found_inf > 0, before, buffer)
            length = torch.where(found_inf > 0, 1.0, length)
        state["momentum_buffer"] = before.copy_(buffer)
        filters.mul_(length)
        gradient.copy_(direction if scale is None else direction * scale)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Move the singular values of a matrix [M, N] close to 1, by Newton-Schulz iterations.

    In the precision of the matrix: in bfloat16, as usual, the smallest difference between two
    numbers of processes would become 0.4 %.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
