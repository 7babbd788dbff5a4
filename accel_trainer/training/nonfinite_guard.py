"""Finds gradients that are NaN or inf before the update, and reports the samples behind them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.buffers import BufferHistory
from ..core.errors import DivergedError
from ..core.json_files import write_json
from ..core.parameters import parameters_of
from ..core.shards import local_part
from ..core.train_state import TrainState
from ..core.training_mode import set_training_mode
from ..core.types import Batch, StepBatch, Task, eval_step_of
from ..distributed.collectives import gather_rows
from ..distributed.streams import has_streams, record_events
from .strategy.base import Strategy

_logger = logging.getLogger(__name__)

_MAX_RECENT = 10
# So many skipped steps, within so many steps, end the run.
_TOO_OFTEN = ((3, 3), (_MAX_RECENT, 1000))


class PendingUpdate(NamedTuple):
    """An update that is about to be applied."""

    position: TrainState
    """The position before the step."""
    step_batch: StepBatch
    losses: Sequence[Tensor]
    """The loss sum [] of each micro-batch."""


class NonfiniteGuard:
    """Prevents updates by a gradient that is NaN or inf, and reports which samples caused it.

    Gradients are averaged over the processes first, so all processes find the same without
    communication. The run then ends; with `may_skip` it continues without the update, unless that
    happens too often. `skipped_steps` are the latest of these steps, a part of the checkpoint. Each
    is described by a file in `folder`.

    The host waits for the flag only if it must. On an accelerator with streams and with a fused
    optimizer, the check is deferred unless the run `may_skip`: the optimizer's kernel reads the
    flag on the device (`found_inf`) and does not apply a bad update, and the host reads the flag
    one step later.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        may_skip: bool,
        model: nn.Module,
        optimizer: Optimizer,
        buffers: BufferHistory,
        task: Task,
        folder: Path,
    ) -> None:
        self.skipped_steps: list[int] = []
        self._strategy = strategy
        self._accelerator = accelerator = strategy.accelerator
        self._may_skip = may_skip
        self._model = model
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._buffers = buffers
        self._task = task
        self._folder = folder
        # Stays 1 until it is reset: while the check is deferred, no later update is applied either.
        self._found = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        self._one = torch.ones_like(self._found)
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self._may_defer = (
            not may_skip
            and is_fused
            and has_streams(accelerator.device)
            and not strategy.has_collective_forward
        )
        self._pending: tuple[PendingUpdate, Tensor, Callable[[], None]] | None = None

    def must_skip(self, update: PendingUpdate, grad_norm: Tensor | None) -> bool:
        """Check the gradient; return whether the caller must not call the optimizer.

        **Host sync**, unless the check is deferred.

        A deferred check always returns False: the optimizer is to be called, and does not apply a
        bad update. What this call raises is then about the step before.

        Raises:
            DivergedError: the gradient is NaN or inf, and the run must end.
        """
        found = self._find_nonfinite(grad_norm)
        if self._may_defer:
            self._optimizer.found_inf = found  # type: ignore[attr-defined]  # as GradScaler does
            self.flush(steps_ago=1)
            flag = self._found.to("cpu", non_blocking=True, copy=True)
            self._pending = (update, flag, record_events(self._found.device))
            return False
        if not found:
            return False
        self._found.zero_()
        self.report(update)
        return True

    def _find_nonfinite(self, grad_norm: Tensor | None) -> Tensor:
        """Return a flag [] on the device: 1 if a gradient is NaN or inf.

        The flag also stays 1 after a bad update that has not been reported yet.
        """
        # The norm is NaN or inf if any gradient is.
        if grad_norm is None:
            gradients = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        else:
            gradients = [grad_norm]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        return self._strategy.is_on_any_process(self._found)

    def flush(self, *, steps_ago: int = 0) -> None:
        """Wait for the flag of a deferred check, if one is pending, and read it.

        `steps_ago` is 1 if the step after the checked one has begun.

        Raises:
            DivergedError: the update was bad.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            update, flag, wait = pending
            wait()
            if flag:
                self.report(update, steps_ago=steps_ago)

    def report(self, update: PendingUpdate, *, steps_ago: int = 0) -> None:
        """Undo and record a step whose gradient is NaN or inf; then warn, or end the run.

        **Collective. Host sync.**

        `steps_ago` is 1 if the next step has begun.

        Raises:
            DivergedError: the run must end.
        """
        self._buffers.restore(steps_ago=steps_ago)
        record = self._build_record(update)
        fact = self._write(record)
        self.skipped_steps = [*self.skipped_steps, record["optimizer_step"]][-_MAX_RECENT:]
        if not self._may_skip:
            raise DivergedError(
                "NONFINITE",
                f"{fact}: fix the data, lower the learning rate, "
                "or skip such steps with --on-nonfinite skip",
            )
        if skips_too_often(self.skipped_steps):
            raise DivergedError(
                "NONFINITE", f"{fact}, which happened too often: lower the learning rate"
            )
        if self._accelerator.is_main_process:
            _logger.warning("%s; training continues", fact)

    def _write(self, record: Mapping[str, Any]) -> str:
        """Write the record of a step into a file on the main process; return it as a message."""
        path = self._folder / f"nonfinite-step-{record['optimizer_step']:010d}.json"
        if self._accelerator.is_main_process:
            with suppress(OSError):  # a full disk must not hide the error itself
                write_json(path, record)
        samples = "no single sample"
        if ids := record["nonfinite_sample_ids"]:
            samples = f"sample ids {', '.join(map(str, ids[:8]))}{' ...' * (len(ids) > 8)}"
        return (
            f"step {record['optimizer_step']}, epoch {record['position']['epoch'] + 1}: the "
            "gradient is NaN or inf and is not applied "
            f"(loss sum {record['loss_sum']}, {samples}, see {path.name})"
        )

    def _build_record(self, update: PendingUpdate) -> dict[str, Any]:
        """Return the step and the samples that caused it, as JSON values.

        **Collective. Host sync.**
        """
        position = update.step_batch.position
        # A row for each sample of a bad micro-batch: its id, and whether it is a cause.
        rows = [
            torch.stack([batch.sample_ids, self._are_suspect(batch.at(position)).long()], dim=1)
            for batch, loss_sum in zip(update.step_batch.micro_batches, update.losses, strict=True)
            if not torch.isfinite(loss_sum)
        ]
        none = torch.zeros(0, 2, dtype=torch.int64, device=self._found.device)
        found = gather_rows(torch.cat([none, *rows]), self._accelerator)
        # Norm layers spread a NaN to good samples and processes. If no sample is known to be a
        # cause, all samples of the bad micro-batches are listed.
        blamed = found[found[:, 1] > 0] if found[:, 1].any() else found
        total = float(self._accelerator.reduce(torch.stack([*update.losses]).sum()))
        return {
            "optimizer_step": update.position.optimizer_step + 1,
            "position": update.position._asdict(),
            "loss_sum": total if math.isfinite(total) else str(total),
            "nonfinite_sample_ids": sorted(blamed[:, 0].tolist()),
        }

    def _are_suspect(self, batch: Batch) -> Tensor:
        """Return for each sample [B] of a bad micro-batch whether its own loss is NaN or inf."""
        if self._strategy.has_collective_forward:
            return torch.zeros_like(batch.sample_ids)
        self._model.eval()  # in training mode, batch norms mix the samples
        with torch.no_grad(), self._accelerator.autocast():
            output = eval_step_of(self._task)(self._model, batch)
        set_training_mode(self._model)
        # The mean of a micro-batch blames nobody.
        return ~torch.isfinite(output.losses).expand(len(batch)) & output.is_per_sample


def skips_too_often(steps: Sequence[int]) -> bool:
    """Whether a run that skipped `steps`, in order, must end: 3 in a row, or 10 within 1000."""
    return any(
        len(steps) >= count and steps[-1] - steps[-count] < num_steps
        for count, num_steps in _TOO_OFTEN
    )
