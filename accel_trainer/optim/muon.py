"""`muon`: SGD that orthogonalises the momentum of filters; not torch.optim's `Muon`.

torch's class takes matrices only, and orthogonalises in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

# The quintic polynomial of K. Jordan et al., "Muon: An optimizer for hidden layers in neural
# networks", 2024 (kellerjordan.github.io/posts/muon): of those that keep large singular values
# within 0.7 to 1.2, it is the steepest at 0.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# As in airbench94_muon. Five iterations come closer to 1, and train no better there.
_ITERATIONS = 3


class Muon(SGD):
    """SGD, except for groups with a `filter_momentum`: these step along orthogonalised momentum.

    Filters [out, in, ...] are treated as a matrix [out, in * ...]. As in airbench94_muon, their
    momentum is Nesterov's, and before each step their norm is set to sqrt(out), unless it is 0.
    Such groups need a `momentum` and `weight_decay` of 0. Parameters must not be sharded.

    Checkpoints contain the name of this class, so it cannot change.
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
        """Replace the gradient by the direction in which SGD without momentum then steps.

        In place, since fused kernels need the layout of the gradient.
        """
        gradient = filters.grad
        state = self.state[filters]
        assert gradient is not None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(filters)
        before = state["momentum_buffer"]
        unscaled = gradient if scale is None else gradient / scale
        buffer = torch.add(unscaled, before, alpha=momentum)
        direction = orthogonalized((unscaled + momentum * buffer).flatten(1)).view_as(filters)
        length = len(filters) ** 0.5 / filters.norm()
        # Filters that are 0 have no direction, and cannot get another norm.
        length = torch.where(length.isfinite(), length, 1.0)
        # If the step is skipped, nothing may change. `where` decides it without a host sync.
        if found_inf is not None:
            buffer = torch.where(found_inf > 0, before, buffer)
            length = torch.where(found_inf > 0, 1.0, length)
        before.copy_(buffer)
        filters.mul_(length)
        gradient.copy_(direction if scale is None else direction * scale)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Move the singular values of a matrix [M, N] close to 1, by Newton-Schulz iterations.

    The iterations keep the dtype of the matrix. In bfloat16, which is usual, the smallest
    difference between runs on different numbers of processes would become 0.4 %.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
