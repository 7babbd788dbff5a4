"""Finds a gradient that is NaN or inf on all processes before the update, and reports the samples behind it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import filesystem
from ..core.buffers import BufferHistory
from ..core.errors import DivergedError
from ..core.train_state import TrainState
from ..core.training_mode import set_training_mode
from ..core.types import Batch, StepBatch, Task
from ..distributed.collectives import gather_rows
from ..distributed.streams import arrival, has_streams

_logger = logging.getLogger(__name__)

_MAX_IN_A_ROW, _MAX_RECENT, _RECENT_STEPS = 3, 10, 1000


class PendingUpdate(NamedTuple):
    """An update that is about to be applied: its position, step batch, and loss sums [] of the micro-batches."""

    position: TrainState
    step_batch: StepBatch
    losses: Sequence[Tensor]


class Gradients(Protocol):
    """What a strategy knows of the gradients of a step."""

    accelerator: Accelerator
    has_collective_forward: bool

    def local_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return what this process has of each."""

    def is_found_anywhere(self, flag: Tensor) -> Tensor:
        """Return a flag [] that is 1 on all processes if `flag` is on one.

        **Collective** with shards.
        """


class NonfiniteGuard:
    """Skips an update whose gradient is NaN or inf, and reports which samples caused it.

    Gradients are averaged over the processes first, so all processes find it in the same step
    without communication. The run then ends, or with `may_skip` continues unless it happens too
    often. `skipped_steps` are the latest skipped steps, a part of the checkpoint; `folder` gets a
    report of each.

    On an accelerator with streams the fused optimizer skips the update itself, and the host reads
    the flag a step later instead of waiting for it, unless the run `may_skip`.
    """

    def __init__(
        self,
        strategy: Gradients,
        *,
        may_skip: bool,
        model: nn.Module,
        optimizer: Optimizer,
        buffers: BufferHistory,
        task: Task,
        seed: int,
        folder: Path,
    ) -> None:
        self.skipped_steps: list[int] = []
        self._strategy = strategy
        self._accelerator = accelerator = strategy.accelerator
        self._may_skip = may_skip
        self._model = model
        self._optimizer = optimizer
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._buffers = buffers
        self._task = task
        self._seed = seed
        self._folder = folder
        self._found = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        self._one = torch.ones_like(self._found)
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        can_defer = (
            has_streams(accelerator.device) and is_fused and not strategy.has_collective_forward
        )
        self._may_defer = can_defer and not may_skip
        self._pending: tuple[PendingUpdate, Tensor, Callable[[], None]] | None = None

    def should_skip(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        """Return whether to skip the update. **Host sync**, unless the check is deferred.

        Raises:
            DivergedError: the update must be skipped, and the run must end.
        """
        found = self.scan(grad_norm)
        if self._may_defer:
            self._optimizer.found_inf = found  # type: ignore[attr-defined]  # GradScaler sets it, too
            self.defer_finite_check(update)
            return False
        if not found:
            return False
        self._found.zero_()
        self.report(update)
        return True

    def scan(self, grad_norm: Tensor | None) -> Tensor:
        """Return a flag [] on the device: 1 if a gradient is NaN or inf, also from an update not yet reported."""
        # The norm is NaN or inf if any gradient is.
        if grad_norm is None:
            gradients = [gradient for p in self._parameters if (gradient := p.grad) is not None]
        else:
            gradients = [grad_norm]
        gradients = self._strategy.local_parts(gradients)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        return self._strategy.is_found_anywhere(self._found)

    def defer_finite_check(self, update: PendingUpdate) -> None:
        """Start to copy the flag of an update to the host, and read that of the update before."""
        self.flush(steps_ago=1)
        flag = self._found.to("cpu", non_blocking=has_streams(self._found.device), copy=True)
        self._pending = (
            update._replace(position=replace(update.position)),
            flag,
            arrival(self._found.device),
        )

    def flush(self, *, steps_ago: int = 0) -> None:
        """Read the flag of the last update, if it was deferred. Raises DivergedError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            update, flag, wait = pending
            wait()
            if flag:
                self.report(update, must_stop=True, steps_ago=steps_ago)

    def report(self, update: PendingUpdate, *, must_stop: bool = False, steps_ago: int = 0) -> None:
        """Record a non-finite step, and warn or raise DivergedError. **Collective. Host sync.**

        `must_stop`: even if the run may skip. `steps_ago`: 1 if the next step has begun.
        """
        self._buffers.restore(steps_ago=steps_ago)
        record = self._describe(update)
        step, ids = record["optimizer_step"], record["nonfinite_sample_ids"]
        path = self._folder / f"nonfinite-step-{step:010d}.json"
        if self._accelerator.is_main_process:
            with suppress(OSError):  # a full disk must not hide the error itself
                filesystem.write_file_atomic(path, json.dumps(record, indent=1).encode())
        samples = (
            f"sample ids {', '.join(map(str, ids[:8]))}{' ...' * (len(ids) > 8)}"
            if ids
            else "no single sample"
        )
        where = f"step {step}, epoch {update.position.epoch + 1}"
        found = f"(loss sum {record['loss_sum']}, {samples}, see {path.name})"
        fact = f"{where}: the gradient is NaN or inf and is not applied {found}"
        self.skipped_steps = [*self.skipped_steps, step][-_MAX_RECENT:]
        if must_stop or not self._may_skip:
            fix = (
                "fix the data, lower the learning rate, or skip such steps with --on-nonfinite skip"
            )
            raise DivergedError("NONFINITE", f"{fact}: {fix}")
        if are_too_many(self.skipped_steps):
            raise DivergedError(
                "NONFINITE", f"{fact}, which happened too often: lower the learning rate"
            )
        if self._accelerator.is_main_process:
            _logger.warning("%s; training continues", fact)

    def _describe(self, update: PendingUpdate) -> dict[str, Any]:
        """Return the step and the samples behind it, as JSON values. **Collective. Host sync.**"""
        # a row per sample of a bad micro-batch: its id, and whether it is a cause
        rows: list[Tensor] = []
        for batch, loss_sum in zip(update.step_batch.micro_batches, update.losses, strict=True):
            if not torch.isfinite(loss_sum):
                rows.append(torch.stack([batch.sample_ids, self._are_suspect(batch).long()], dim=1))
        none = torch.zeros(0, 2, dtype=torch.int64, device=self._found.device)
        found = gather_rows(torch.cat([none, *rows]), self._accelerator)
        # Norm layers spread a NaN to good samples and processes. If no sample is the cause, list
        # all that have one.
        blamed = found[found[:, 1] > 0] if found[:, 1].any() else found
        total = float(self._accelerator.reduce(torch.stack([*update.losses]).sum()))
        return {
            "optimizer_step": update.position.optimizer_step + 1,
            "position": asdict(update.position),
            "seed": self._seed,
            "loss_sum": total if math.isfinite(total) else str(total),
            "nonfinite_sample_ids": sorted(blamed[:, 0].tolist()),
        }

    def _are_suspect(self, batch: Batch) -> Tensor:
        """Return which samples [B] cause the loss of a micro-batch to be NaN or inf."""
        if self._strategy.has_collective_forward:
            return torch.zeros_like(batch.sample_ids)
        self._model.eval()  # so that no norm layer mixes the samples
        with torch.no_grad(), self._accelerator.autocast():
            losses = self._task.eval_step(self._model, batch).losses
        set_training_mode(self._model)
        return ~torch.isfinite(losses)


def are_too_many(steps: Sequence[int]) -> bool:
    """Whether a run that skipped `steps`, the latest last, should end: 3 in a row, or 10 of 1000."""
    is_in_a_row = (
        len(steps) >= _MAX_IN_A_ROW and steps[-_MAX_IN_A_ROW] == steps[-1] - _MAX_IN_A_ROW + 1
    )
    return is_in_a_row or (
        len(steps) >= _MAX_RECENT and steps[-_MAX_RECENT] > steps[-1] - _RECENT_STEPS
    )
