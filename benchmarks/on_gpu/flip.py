"""Callbacks of a run whose device seems to compute a wrong bit: in its fifth backward."""

from typing import Any

import torch
from torch import Tensor

from accel_trainer import Callback

BACKWARD = 5  # with --check-every 4: when step 4 is computed again


class Flip(Callback):
    def __init__(self) -> None:
        self._num_left = BACKWARD

    def on_fit_start(self, trainer: Any) -> None:
        next(trainer.model.parameters()).register_hook(self._pass_on)

    def _pass_on(self, gradient: Tensor) -> Tensor:
        self._num_left -= 1
        if self._num_left:
            return gradient
        wrong = gradient.clone()
        wrong.view(torch.int32)[(0,) * wrong.ndim] ^= 1
        return wrong
