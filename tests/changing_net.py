"""A net whose forward changes buffers in the ways that users' models do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .workload import NUM_CLASSES, SmallNet


class ChangingNet(SmallNet):
    """A net whose forward assigns `center`, as DINO does; its logits depend on what it `counted`.

    counted: "calls" adds 1 to an integer buffer, which it assigns; "samples" adds the number of
    samples of the batch to one; "usage" adds to each class how often it was predicted. The latter
    two are `summed` if the model says so.
    """

    def __init__(self, counted: str = "calls", *, is_summed: bool = True) -> None:
        super().__init__(norm="batch", dropout=0.2)
        self.register_buffer("center", torch.zeros(NUM_CLASSES))
        self.register_buffer(
            counted, torch.zeros(NUM_CLASSES if counted == "usage" else (), dtype=torch.int64)
        )
        self.counted = counted
        if is_summed and counted != "calls":
            self.summed_buffers = (counted,)

    def forward(self, images: Tensor) -> Tensor:
        outputs = super().forward(images)
        logits = outputs - self.center + getattr(self, self.counted) / 1000
        if self.training:
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
            if self.counted == "calls":
                self.calls = self.calls + 1
            elif self.counted == "samples":
                self.samples += len(images)
            else:
                self.usage += outputs.argmax(1).bincount(minlength=NUM_CLASSES)
        return logits


NETS: dict[str, Callable[[], ChangingNet]] = {
    "assigned": ChangingNet,
    "samples": lambda: ChangingNet("samples"),
    "usage": lambda: ChangingNet("usage"),
    "usage, not declared": lambda: ChangingNet("usage", is_summed=False),
}
