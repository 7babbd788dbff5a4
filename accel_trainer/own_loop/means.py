"""The means of what a user's own loop logs, over all steps and processes since the last row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..callbacks.metric_logger import summable
from ..core.errors import ConfigError
from ..core.registry import StateDict, Stateful
from ..core.wording import describe_tensor
from ..training.evaluation.metrics import sums_device

_MAX_PENDING = 256  # numbers that are kept before they are summed


def number_in(name: str, value: Any) -> float | Tensor:
    """Return a number, or a tensor [] apart from its owner's, who may change it before a row.

    Raises ConfigError for anything else.
    """
    try:
        return value.detach().reshape(()).clone() if isinstance(value, Tensor) else float(value)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(
            "LOG", f"{name} is {describe_tensor(value)}: give one number, or a tensor []"
        ) from None


class Means(Stateful):
    """Sums of numbers by name, on the device; a checkpoint has those over all processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._device = sums_device(accelerator.device)
        self._pending: dict[str, list[Tensor | float]] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Add a number, or a tensor [] on any device. Raises ConfigError for anything else."""
        number = number_in(name, value)
        pending = self._pending.setdefault(name, [])
        pending.append(number)
        if len(pending) == _MAX_PENDING:
            self._sum(name)

    def _sum(self, name: str) -> None:
        numbers = self._pending.pop(name)
        exact = partial(torch.as_tensor, dtype=torch.float64, device=self._device)
        values = torch.stack([*map(exact, numbers)])
        total = torch.stack([summable(values).sum(), values.new_tensor(len(numbers))])
        self._sums[name] = self._sums.get(name, 0) + total

    def read(self) -> dict[str, float]:
        """Return the means, and start again. **Collective. Host sync** if anything was logged."""
        means = {name: total / count for name, (total, count) in self.state_dict().items()}
        self._sums = {}
        return means

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums and counts over all processes. **Collective. Host sync.**"""
        for name in [*self._pending]:
            self._sum(name)
        if not self._sums:
            return {}
        names = sorted(self._sums)
        sums = self._accelerator.reduce(torch.stack([self._sums[name] for name in names]))
        return dict(zip(names, sums.tolist(), strict=True))

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the sums on the main process; the others start at zero."""
        is_main = self._accelerator.is_main_process
        self._pending = {}
        self._sums = {
            name: torch.tensor(values, dtype=torch.float64, device=self._device) * is_main
            for name, values in state.items()
        }
