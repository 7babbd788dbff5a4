"""Evaluation: every sample exactly once for any number of processes, one collective and one host sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, send_to_device
from torch import Tensor, nn

from .errors import ConfigError, DataError, UserError
from .metrics import plain_values, sums_device
from .preemption import StopFlag
from .seeding import random_bits
from .sharding import is_sharded
from .types import Batch, EvalLoader, EvalOutput, Metric, Task

_CHUNK = 1 << 20  # ids that are hashed at a time
_LOWER_HALF = 0xFFFFFFFF


class EvaluationStopped(Exception):
    """A signal ended an evaluation early, on all processes: it has no result."""


class MetricFailed(Exception):
    """A metric raised an error, on one process or more: the evaluation has no result, on any."""


class MetricRefused(MetricFailed, ConfigError):
    """A metric cannot measure what the task makes of a batch: how to fix it, in one line, on all processes."""


class Evaluator:
    """Runs a task over an evaluation set and merges its metrics over all processes."""

    def __init__(self, loader: EvalLoader, *, task: Task, metrics: Sequence[Metric], accelerator: Accelerator) -> None:
        if loader.num_samples < 1:
            raise DataError("DATA_TOO_SMALL", "there are no samples to evaluate on: add some")
        for metric in metrics:
            if not hasattr(metric, "higher_is_better"):
                raise ConfigError(
                    "METRIC",
                    f"metric {type(metric).__name__} has no higher_is_better: add the names of its numbers that a run "
                    'may be judged by, as in {"loss": False}, or {}',
                )
        names = [name for metric in metrics for name in metric.higher_is_better]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            fix = "leave one out, or let it give its numbers other names"
            raise ConfigError("METRIC", f"two metrics name their number {', '.join(repeated)}: {fix}")
        self.loader, self.task, self.metrics, self.accelerator = loader, task, metrics, accelerator
        self._sums_device = sums_device(accelerator.device)

    def run(self, model: nn.Module, *, stop_flag: StopFlag | None = None) -> dict[str, Any]:
        """Return the metrics of the unwrapped `model` over all samples. **Collective. Host sync** (one).

        `model` must not be wrapped in DDP: its forward would wait for processes whose share is shorter. If its
        weights are sharded, the loader must give as many batches, some perhaps empty, to every process.

        Raises:
            EvaluationStopped: some process had raised `stop_flag`, by a signal.
            MetricFailed: on all processes, once they have met at the end; also for what is no number, text, list
                or dict of these among its results.
            RuntimeError: the processes together did not count each sample once.
        """
        was_training = model.training
        model.eval()
        _share_buffers(model, self.accelerator)
        parts = [metric.empty(self._sums_device) for metric in self.metrics]
        batches = self.loader.batches()
        seen, failure = self._update(model, parts, batches if stop_flag is None else stop_flag.until_preempted(batches))
        model.train(was_training)
        if stop_flag is not None and stop_flag.agreed.is_preemption:
            raise EvaluationStopped
        ids = torch.cat(seen).long() if seen else torch.zeros(0, dtype=torch.int64)
        # Filled on the device: a tensor made of numbers would be copied there, for which the host waits.
        counts = [ids.new_full((1,), len(ids)), ids.new_full((1,), failure is not None)]
        coverage = torch.cat([_hash_sum(ids.split(_CHUNK)), *counts])
        covered, *merged = self._merge([coverage.to(self._sums_device).double(), *parts])
        *hash_sum, num_counted, num_failures = covered.tolist()
        if num_failures:
            raise failure or MetricFailed("by peer")  # the words that make `status` look for whose it is
        self._check_each_once(num_counted, _joined(hash_sum))
        results: dict[str, Any] = {}
        for metric, sums in zip(self.metrics, merged, strict=True):
            try:
                results.update(plain_values(metric.compute(sums)))
            except Exception as error:
                raise _failure_of(metric, error) from error
        return results

    def _update(
        self, model: nn.Module, parts: Sequence[Tensor], batches: Iterable[Batch]
    ) -> tuple[list[Tensor], MetricFailed | None]:
        """Add `batches` to the metrics' sums; return the ids that were seen, and the first failure of a metric."""
        seen: list[Tensor] = []
        failure: MetricFailed | None = None
        sharded = is_sharded(self.accelerator)
        # What FSDP gathers in inference mode could not be trained with afterwards (torch 2.13).
        with torch.no_grad() if sharded else torch.inference_mode(), self.accelerator.autocast():
            for batch in batches:
                if len(batch) > 0 or sharded:  # a forward through shards is collective
                    output = self.task.eval_step(model, batch)
                if len(batch) == 0:
                    continue
                if self._sums_device != self.accelerator.device:
                    batch, output = _moved(batch, output, self._sums_device)
                seen.append(batch.sample_ids)  # wherever the loader keeps them
                for metric, sums in zip(self.metrics, parts, strict=True):
                    try:
                        metric.update(sums, batch, output)
                    except Exception as error:
                        failure = failure or _failure_of(metric, error)
        return seen, failure

    def _check_each_once(self, num_counted: float, hash_sum: int) -> None:
        num_samples = self.loader.num_samples
        if num_counted != num_samples:
            fact = f"evaluation counted {num_counted:.0f} samples of {num_samples}"
        elif hash_sum != self._expected_hash_sum:
            fact = f"evaluation counted some of {num_samples} samples twice and left others out"
        else:
            return
        raise RuntimeError(f"{fact}: the evaluation loader must give each sample to exactly one process")

    @cached_property
    def _expected_hash_sum(self) -> int:
        num_samples = self.loader.num_samples
        starts = range(0, num_samples, _CHUNK)
        return _joined(_hash_sum(torch.arange(start, min(start + _CHUNK, num_samples)) for start in starts).tolist())

    def _merge(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Add up all sums over the processes in one collective; return them on the CPU."""
        flat = self.accelerator.reduce(torch.cat([part.reshape(-1) for part in parts]), reduction="sum").cpu()
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _moved(batch: Batch, output: EvalOutput, device: torch.device) -> tuple[Batch, EvalOutput]:
    """Bring a batch and what the task made of it to `device`. **Host sync.**"""
    # Not by `Batch.to`: the host would read a copy that does not block before it has arrived.
    return batch.map(lambda tensor: tensor.to(device)), EvalOutput(*send_to_device(tuple(output), device))


def _hash_sum(chunks: Iterable[Tensor]) -> Tensor:
    """Return the sum of a 64-bit hash of each id in `chunks` [*], modulo 2**64: its lower and upper half, int64 [2].

    A plain sum of ids is the same for 0, 3, 0, 3 as for 0, 1, 2, 3. Halves add up over processes exactly in float64.
    """
    # The ids themselves as well: the bits are those of an id modulo 2**32.
    total = sum(((random_bits(0, ids, 0) << 32) + random_bits(0, ids, 1) + ids).sum() for ids in chunks)
    assert isinstance(total, Tensor)
    return torch.stack([total & _LOWER_HALF, (total >> 32) & _LOWER_HALF])


def _joined(halves: Sequence[float]) -> int:
    lower, upper = map(int, halves)
    return (lower + (upper << 32)) % 2**64


def _failure_of(metric: Metric, error: Exception) -> MetricFailed:
    if isinstance(error, UserError):
        failure: MetricFailed = MetricRefused(error.code, f"metric {type(metric).__name__}: {error.args[0]}")
    else:
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
