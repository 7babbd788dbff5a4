"""The update of the weights from the gradients of a step batch; skipped if they are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..core.errors import ConfigError
from ..core.train_state import TrainState
from ..core.types import StepBatch, StepOutput
from ..distributed.fsdp import is_sharded, local_part
from ..fault_tolerance.nonfinite_guard import NonfiniteGuard, PendingUpdate
from ..optim.evaluation_weights import has_evaluation_weights
from ..optim.optimizers import fill_momentum
from ..optim.reduction import Reduction

_MIN_LOSS_SCALE = 1e-3  # a gradient that overflows even below it is NaN or inf, not a float16 overflow
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class StepResult(NamedTuple):
    """The gradient norm [] before clipping, None without clipping, and whether the update was skipped."""

    grad_norm: Tensor | None
    was_skipped: bool


class OptimizerStep:
    """Steps the optimizer by the gradients of a step batch.

    Without a GradScaler or an engine of its own, accelerate's wrappers of `backward` and `step` call what is called
    here directly: then they are bypassed, since they take half as long as the step of a tiny model. While a step
    `is_open`, `undo` leaves no trace of it.
    """

    def __init__(
        self, *, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer,
        prepared_optimizer: Optimizer, reduction: Reduction, guard: NonfiniteGuard, max_grad_norm: float | None,
    ) -> None:  # fmt: skip
        self._accelerator, self._model, self._guard, self._reduction = accelerator, model, guard, reduction
        self._max_grad_norm = max_grad_norm
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scales: dict[float, Tensor] = {}
        self._has_counts: bool | None = None  # whether the task counts items, known from the first step on
        self.is_open = False
        self.bypass_accelerate = accelerator.scaler is None and accelerator.distributed_type in _PLAIN
        self.optimizer = optimizer if self.bypass_accelerate else prepared_optimizer
        if isinstance(model, DistributedDataParallel):
            _settle_buckets(model)
            self._drop_gradients()
        if is_sharded(accelerator):
            # "_fused_sgd_ does not have a sharding strategy" (torch 2.13).
            for group in optimizer.param_groups:
                group["fused"] = False
        if has_evaluation_weights(optimizer):
            optimizer.train()  # type: ignore[attr-defined]  # it has, see above
        fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(fill_momentum)

    def begin(self) -> None:
        """Save what the forwards of a step change."""
        self._reduction.begin()
        self._guard.save_buffers()
        self.is_open = True

    def backward(self, loss_sum: Tensor, scale: float) -> None:
        """Add the gradients of `loss_sum * scale` [].

        The scale is the gradient of the sum: the product and its backward would add 7 % to the step of a tiny model.
        """
        gradient = self._scales.get(scale)
        if gradient is None:
            gradient = self._scales[scale] = torch.full_like(loss_sum, scale)
        if self.bypass_accelerate:
            torch.autograd.backward(loss_sum, gradient)
        else:
            self._accelerator.backward(loss_sum, gradient=gradient)

    def reduce(
        self, losses: Sequence[Tensor], sums: Sequence[Mapping[str, Tensor]], counts: Sequence[Tensor], *,
        num_samples: int,
    ) -> StepOutput:  # fmt: skip
        """Let the parameters have the gradients of the step, and return the sums to report. **Collective.**

        Where the task counts items, known only after the forwards, the gradients, divided by samples so far, are then
        divided by the items of all processes. A step may have no item, if every token is padding.

        Raises:
            ConfigError: the task counts items only sometimes.
        """
        self._check_counts_always(len(counts), len(losses))
        output, items = self._reduction.finish(losses, sums, counts)
        if items is None:
            return output
        # Not in bfloat16, which has no 257. Fewer than none make a NaN, which the guard finds.
        items = items.to(torch.promote_types(self._parameters[0].dtype, torch.float))
        ratio = num_samples / items.masked_fill(items == 0, 1).masked_fill(items < 0, torch.nan)
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(ratio)
        return output

    def _check_counts_always(self, num_counts: int, num_micro_batches: int) -> None:
        """Raise ConfigError if the task counts items only sometimes. **Collective** in the first step.

        A process that counted none would miss the collective of the others.
        """
        has_counts, is_uniform = num_counts > 0, num_counts in (0, num_micro_batches)
        if self._has_counts is None:
            self._has_counts = has_counts
            if self._accelerator.num_processes > 1:
                flag = torch.tensor(float(has_counts), device=self._accelerator.device)
                is_uniform &= float(self._accelerator.reduce(flag)) in (0, self._accelerator.num_processes)
        if not is_uniform or has_counts != self._has_counts:
            fact = "train_step returned num_items for some micro-batches only"
            raise ConfigError("NUM_ITEMS", f"{fact}: return them for all, 0 where there are none")

    def apply(self, position: TrainState, step_batch: StepBatch, losses: Sequence[Tensor]) -> StepResult:
        """Clip, step and drop the gradients. **Host sync** with loss scaling.

        Raises:
            DivergedError: the gradients are NaN or inf, and so the run must end.
        """
        self.is_open = False
        grad_norm: Tensor | None = None
        if self._max_grad_norm is not None:
            grad_norm = local_part(self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm))
        update = PendingUpdate(position, step_batch, losses)
        if self._accelerator.scaler is not None:
            was_skipped = self._step_scaled(update, self._accelerator.scaler)
        else:
            was_skipped = self._guard.should_skip(update, grad_norm)
            if not was_skipped:
                self.optimizer.step()
        self._drop_gradients()
        return StepResult(grad_norm, was_skipped)

    def undo(self) -> None:
        """Restore the gradients and running statistics from before a step that was not completed."""
        self.is_open = False
        self._drop_gradients()
        self._guard.restore_buffers()

    def _drop_gradients(self) -> None:
        """Do what `zero_grad` does, without its profiler hooks, which add 7 % to the step of a tiny model."""
        for parameter in self._parameters:
            parameter.grad = None

    def _step_scaled(self, update: PendingUpdate, scaler: GradScaler) -> bool:
        """Step the optimizer with loss scaling; return whether an overflow, NaN or inf skipped the step."""
        # A fused optimizer skips inside its kernel, which accelerate 1.15 does not notice: the scale shows it.
        scale = scaler.get_scale()
        self.optimizer.step()
        if scaler.get_scale() >= scale:
            return False
        self._guard.restore_buffers()
        if scaler.get_scale() < _MIN_LOSS_SCALE:
            self._guard.report(update, must_stop=True)
        elif self._has_nonfinite_loss(update.losses):
            self._guard.report(update)
        return True

    def _has_nonfinite_loss(self, losses: Sequence[Tensor]) -> bool:
        """Whether some process has a loss that is NaN or inf, which no scale fixes. **Collective. Host sync.**"""
        is_bad = ~torch.isfinite(torch.stack(list(losses))).all()
        return bool(self._accelerator.reduce(is_bad.float()) > 0)


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP rebuild its gradient buckets before the first step. **Collective.**

    DDP rebuilds them after its first backward, and with three or more processes the order of summation depends on the
    place in a bucket: the first step after a resume would round differently from the same step without one (torch
    2.13). So this runs a backward that trains nothing and reaches the parameters from the last to the first.
    """
    if model.find_unused_parameters or model.static_graph:
        return  # the first never rebuilds; the second must see the graph of a real step first
    model.reducer.prepare_for_backward([])
    total = torch.zeros((), device=model.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            total = total + parameter.sum()
    total.backward()
    model.reducer._rebuild_buckets()
