"""Evaluation: every sample exactly once for any number of processes, one collective and one host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from .types import Batch, EvalLoader, EvalOutput, Metric, Task


class Evaluator:
    """Runs a task over an evaluation set and merges its metrics over all processes."""

    def __init__(
        self, loader: EvalLoader, *, task: Task, metrics: Sequence[Metric], accelerator: Accelerator
    ) -> None:
        self.loader, self.task, self.metrics, self.accelerator = loader, task, metrics, accelerator

    def run(self, model: nn.Module) -> dict[str, Any]:
        """Return the metrics of the unwrapped `model` over all samples. **Collective. Host sync** (one).

        `model` must not be wrapped in DDP: its forward would wait for processes whose share is shorter.

        Raises:
            RuntimeError: the processes together did not count each sample once.
        """
        device = self.accelerator.device
        was_training = model.training
        model.eval()
        _share_buffers(model, self.accelerator)
        count = _Count()
        metrics = [count, *self.metrics]
        parts = [metric.empty(device) for metric in metrics]
        with torch.inference_mode(), self.accelerator.autocast():
            for batch in self.loader.batches():
                if len(batch) == 0:
                    continue
                output = self.task.eval_step(model, batch)
                for metric, sums in zip(metrics, parts, strict=True):
                    metric.update(sums, batch, output)
        model.train(was_training)
        merged = self._merge(parts)
        results: dict[str, Any] = {}
        for metric, sums in zip(metrics, merged, strict=True):
            results.update(metric.compute(sums))
        num_counted = results.pop(count.name)
        if num_counted != self.loader.num_samples:
            raise RuntimeError(
                f"evaluation counted {num_counted} samples of {self.loader.num_samples}: "
                "the evaluation loader must give each sample to exactly one process"
            )
        return results

    def _merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Add up all sums over the processes in one collective; return them on the CPU."""
        flat = self.accelerator.reduce(torch.cat([part.reshape(-1) for part in parts]), reduction="sum").cpu()
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class _Count:
    """How many samples were evaluated."""

    name = "num_samples"

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(1, dtype=torch.float64, device=device)

    def update(self, sums: Tensor, batch: Batch, output: EvalOutput) -> None:
        sums += len(batch)

    def compute(self, sums: Tensor) -> dict[str, Any]:
        return {self.name: int(sums.item())}


def _share_buffers(model: nn.Module, accelerator: Accelerator) -> None:
    """Give every process the main one's buffers: running statistics differ where norms are not synchronised."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return
    flat = broadcast(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]))
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
