"""The update of the weights: gradients of a window in, new weights out, or none if they are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from .nonfinite import NonfiniteGuard, PendingUpdate
from .sharding import is_sharded, local_part
from .state import TrainState
from .types import Window

_MIN_LOSS_SCALE = 1e-3  # what still overflows below it is no overflow of float16, but NaN or inf
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_WRAPPED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


class Outcome(NamedTuple):
    """What became of an update: the norm [] before clipping, if it was asked for, and whether it was left out."""

    grad_norm: Tensor | None
    was_skipped: bool


class WeightUpdate:
    """Steps the optimizer by the gradients that were added, in the shortest way that is exact.

    accelerate's wrappers cost 75 us (step), 25 us (backward) and 10 us (zero_grad) a step and, without
    a GradScaler or an engine of their own, call exactly what is called here (measured, accelerate 1.15):
    then, `is_plain`, they are left out. While a step `is_open`, `undo` leaves no trace of it.
    """

    def __init__(
        self, *, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer,
        prepared_optimizer: Optimizer, guard: NonfiniteGuard, max_grad_norm: float | None,
    ) -> None:  # fmt: skip
        self._accelerator, self._model, self._guard = accelerator, model, guard
        self._max_grad_norm = max_grad_norm
        self._loss_gradients: dict[float, Tensor] = {}
        self.is_open = False
        self.is_plain = accelerator.scaler is None and accelerator.distributed_type in _PLAIN
        self.optimizer = optimizer if self.is_plain else prepared_optimizer
        if isinstance(model, DistributedDataParallel):
            _settle_buckets(model)
            self.drop_gradients()
        if is_sharded(accelerator):
            # "_fused_sgd_ does not have a sharding strategy" (torch 2.13).
            for group in optimizer.param_groups:
                group["fused"] = False

    def begin(self) -> None:
        """Note what the forwards of a step change."""
        self._guard.remember_buffers()
        self.is_open = True

    def add_gradients(self, loss_sum: Tensor, share: float) -> None:
        """Add the gradients of `loss_sum * share`.

        The share enters as the gradient of the sum, kept for the steps to come: the product and its own
        backward would take 11 us more of a step of 140 us (a tiny model on a CPU).
        """
        loss_gradient = self._loss_gradients.get(share)
        if loss_gradient is None:
            loss_gradient = self._loss_gradients[share] = torch.full_like(loss_sum, share)
        if self.is_plain:
            loss_sum.backward(loss_gradient)
        else:
            self._accelerator.backward(loss_sum, gradient=loss_gradient)

    def apply(self, position: TrainState, window: Window, losses: Sequence[Tensor]) -> Outcome:
        """Clip, step and drop the gradients. **Host sync** with loss scaling.

        Raises:
            DivergedError: the gradients are NaN or inf, and so the run must end.
        """
        self.is_open = False
        grad_norm = self._clip_gradients()
        was_skipped = self._step(PendingUpdate(position, window, losses), grad_norm)
        self.drop_gradients()
        return Outcome(grad_norm, was_skipped)

    def undo(self) -> None:
        """Forget the gradients and running statistics of a window that did not come to its end."""
        self.drop_gradients()
        self._guard.restore_buffers()

    def _clip_gradients(self) -> Tensor | None:
        if self._max_grad_norm is None:
            return None
        norm: Tensor = self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        return local_part(norm)

    def _step(self, attempt: PendingUpdate, grad_norm: Tensor | None) -> bool:
        """Step the optimizer, or skip: return whether NaN, inf or an overflow did."""
        scaler = self._accelerator.scaler
        if scaler is None:
            if self._guard.should_skip(attempt, grad_norm):
                return True
            take_step(self.optimizer)
            return False
        # A fused optimizer skips inside its kernel, which accelerate 1.15 does not notice: the scale tells.
        scale, is_first = scaler.get_scale(), not self.optimizer.state
        self.optimizer.step()
        was_skipped = bool(scaler.get_scale() < scale)
        if was_skipped:
            self._guard.restore_buffers()
            if is_first:  # fused SGD made its momentum of uninitialised memory (torch 2.13)
                self.optimizer.state.clear()
            if scaler.get_scale() < _MIN_LOSS_SCALE:
                self._guard.report(attempt, must_stop=True)
            elif self._has_nonfinite_loss(attempt.losses):
                self._guard.report(attempt)
        return was_skipped

    def _has_nonfinite_loss(self, losses: Sequence[Tensor]) -> bool:
        """Whether some process has a loss that is NaN or inf, which no scale cures. **Collective. Host sync.**"""
        is_bad = ~torch.isfinite(torch.stack(list(losses))).all()
        return bool(self._accelerator.reduce(is_bad.float()) > 0)

    def drop_gradients(self) -> None:
        """Forget what was added."""
        self.is_open = False
        if not self.is_plain:
            self.optimizer.zero_grad(set_to_none=True)
            return
        # What `zero_grad` does, without the profiler's hooks around it: 1 us instead of 10 us.
        for parameter in self._guard.parameters:
            parameter.grad = None


def take_step(optimizer: Optimizer) -> None:
    """Step the optimizer, without what torch wraps around its step for hooks and profilers where there are none.

    The wrapper takes 9 to 14 us of a step of 160 us all the same (a tiny model on a CPU, torch 2.13).
    """
    step = type(optimizer).step
    if getattr(step, "__code__", None) is _WRAPPED_STEP and not _is_step_watched(optimizer):
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


def _is_step_watched(optimizer: Optimizer) -> bool:
    mine = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everyones = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    is_replaced = "step" in vars(optimizer)  # as by torch's schedulers, to count
    return bool(mine or everyones or is_replaced or torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Make the buckets, in which gradients are summed over processes, those of all steps. **Collective.**

    DDP makes them anew after its first backward, and three processes or more add in an order that depends on the
    place in a bucket: the first step after a resume would round otherwise than the same step without (torch 2.13).
    So a backward comes first that trains nothing and reaches the parameters from the last to the first.
    """
    if model.find_unused_parameters or model.static_graph:
        return  # the first keeps its buckets; the second must see the graph of a step first
    model.reducer.prepare_for_backward([])
    total = torch.zeros((), device=model.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            total = total + parameter.sum()
    total.backward()
    model.reducer._rebuild_buckets()
