"""Evaluation: every sample exactly once for any number of processes, one collective and one host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from .errors import DataError
from .preemption import StopFlag
from .types import EvalLoader, Metric, Task


class EvaluationStopped(Exception):
    """A signal ended an evaluation early, on all processes: it has no result."""


class MetricFailed(Exception):
    """A metric raised an error, on one process or more: the evaluation has no result, on any."""


class Evaluator:
    """Runs a task over an evaluation set and merges its metrics over all processes."""

    def __init__(self, loader: EvalLoader, *, task: Task, metrics: Sequence[Metric], accelerator: Accelerator) -> None:
        if loader.num_samples < 1:
            raise DataError("DATA_TOO_SMALL", "there are no samples to evaluate on: add some")
        self.loader, self.task, self.metrics, self.accelerator = loader, task, metrics, accelerator

    def run(self, model: nn.Module, *, stop_flag: StopFlag | None = None) -> dict[str, Any]:
        """Return the metrics of the unwrapped `model` over all samples. **Collective. Host sync** (one).

        `model` must not be wrapped in DDP: its forward would wait for processes whose share is shorter.

        Raises:
            EvaluationStopped: some process had raised `stop_flag`, by a signal.
            MetricFailed: on all processes, once they have met at the end.
            RuntimeError: the processes together did not count each sample once.
        """
        device = self.accelerator.device
        was_training = model.training
        model.eval()
        _share_buffers(model, self.accelerator)
        seen: list[Tensor] = []
        parts = [metric.empty(device) for metric in self.metrics]
        failure: MetricFailed | None = None
        batches = self.loader.batches()
        with torch.inference_mode(), self.accelerator.autocast():
            for batch in batches if stop_flag is None else stop_flag.until_preempted(batches):
                if len(batch) == 0:
                    continue
                output = self.task.eval_step(model, batch)
                seen.append(batch.sample_ids)  # wherever the loader keeps them
                for metric, sums in zip(self.metrics, parts, strict=True):
                    try:
                        metric.update(sums, batch, output)
                    except Exception as error:
                        failure = failure or _failure_of(metric, error)
        model.train(was_training)
        if stop_flag is not None and stop_flag.agreed.is_preemption:
            raise EvaluationStopped
        ids = (torch.cat(seen) if seen else torch.zeros(0, dtype=torch.int64)).to(device)
        coverage = torch.cat([ids.new_tensor([len(ids), failure is not None]), ids.sum()[None]]).double()
        covered, *merged = self._merge([coverage, *parts])
        num_counted, num_failures, id_sum = covered.tolist()
        if num_failures:
            raise failure or MetricFailed("by peer")  # the words that make `status` look for whose it is
        self._check_each_once(num_counted, id_sum)
        results: dict[str, Any] = {}
        for metric, sums in zip(self.metrics, merged, strict=True):
            try:
                results.update(metric.compute(sums))
            except Exception as error:
                raise _failure_of(metric, error) from error
        return results

    def _check_each_once(self, num_counted: float, id_sum: float) -> None:
        num_samples = self.loader.num_samples
        if num_counted != num_samples:
            fact = f"evaluation counted {num_counted:.0f} samples of {num_samples}"
        elif id_sum != num_samples * (num_samples - 1) // 2:
            fact = f"evaluation counted some of {num_samples} samples twice and left others out"
        else:
            return
        raise RuntimeError(f"{fact}: the evaluation loader must give each sample to exactly one process")

    def _merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Add up all sums over the processes in one collective; return them on the CPU."""
        flat = self.accelerator.reduce(torch.cat([part.reshape(-1) for part in parts]), reduction="sum").cpu()
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _failure_of(metric: Metric, error: Exception) -> MetricFailed:
    failure = MetricFailed(f"metric {type(metric).__name__} failed ({type(error).__name__}: {error})")
    failure.__cause__ = error
    return failure


def _share_buffers(model: nn.Module, accelerator: Accelerator) -> None:
    """Give every process the main one's buffers: running statistics differ where norms are not synchronised."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return
    flat = broadcast(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]))
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
