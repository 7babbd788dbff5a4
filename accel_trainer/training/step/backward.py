"""accelerate's backward, without the kernels and the autograd node of a division by 1."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import Tensor


def backward(losses: Tensor, gradient: Tensor, accelerator: Accelerator) -> None:
    """Run accelerate's backward of losses [B] from their `gradient` [B]. **Collective** with DDP.

    accelerate divides them by the micro-batches that it accumulates, which is 1 here (1.15).
    """
    # The scaler takes tensors only.
    divided = losses if accelerator.scaler is not None else _Undivided(losses)
    accelerator.backward(divided, gradient=gradient)


class _Undivided:
    """Losses that are the same, divided by 1."""

    def __init__(self, losses: Tensor) -> None:
        self._losses = losses
        self.backward = losses.backward

    def __truediv__(self, number: int) -> Any:
        return self if number == 1 else self._losses / number
