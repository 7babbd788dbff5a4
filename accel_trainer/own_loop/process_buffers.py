"""Buffers that differ between processes, such as the statistics of batch norms under DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..core.registry import StateDict, Stateful
from ..core.tensor_memory import sum_of_bits


class ProcessBuffers(Stateful):
    """What the buffers of the other processes are, where they differ from the main process's.

    DDP sends the main process's buffers to the others before a forward, so between two forwards
    each process has its own. An average of the model has them, too.
    """

    is_optional = True

    def __init__(
        self, model: nn.Module, states: Mapping[str, Any], accelerator: Accelerator
    ) -> None:
        self._buffers = dict(model.named_buffers())
        for name, state in states.items():
            if isinstance(state, nn.Module):
                self._buffers.update(state.named_buffers(prefix=f"states.{name}"))
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Tensor]:
        """Return by name the buffers that differ, stacked by process. **Collective. Host sync.**"""
        if self._accelerator.num_processes == 1 or not self._buffers:
            return {}
        mine = torch.stack([sum_of_bits(each).reshape(1) for each in self._buffers.values()], 1)
        sums = self._accelerator.gather(mine)
        differs = (sums != sums[0]).any(0)
        return {
            name: self._accelerator.gather(buffer[None])
            for (name, buffer), is_different in zip(self._buffers.items(), differs, strict=True)
            if is_different
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Give each process its own again."""
        for name, stacked in state.items():
            self._buffers[name].copy_(stacked[self._accelerator.process_index])
