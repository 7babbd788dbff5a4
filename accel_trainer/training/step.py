"""One optimizer step: it takes place as a whole, or leaves no trace."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..core.buffers import BufferHistory
from ..core.errors import ConfigError
from ..core.parameters import stepped_parameters
from ..core.shards import local_part
from ..core.train_state import TrainState
from ..core.types import Batch, StepBatch, Task
from ..distributed.collectives import differing_lines
from .nonfinite_guard import NonfiniteGuard, PendingUpdate
from .recomputation import Recomputation
from .strategy.base import StepSums, Strategy
from .task_output import check_output

_NO_CONTEXT = nullcontext()
# A gradient that overflows even below this scale is NaN or inf, not a float16 overflow.
_MIN_LOSS_SCALE = 1e-3


class OptimizerStep:
    """Takes the steps of a run: `begin`, `accumulate` for each micro-batch, then `finish`.

    `wrapped_model` is what `strategy.prepare` returned. accelerate's wrappers of `backward` and of
    the optimizer would only call torch's and the GradScaler's methods, as is done here, and take
    half as long as the step of a tiny model (accelerate 1.15).
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        wrapped_model: nn.Module,
        optimizer: Optimizer,
        buffers: BufferHistory,
        guard: NonfiniteGuard,
        max_grad_norm: float | None,
    ) -> None:
        self.strategy = strategy
        self.wrapped_model = wrapped_model
        self._accelerator = strategy.accelerator
        self.buffers = buffers
        self.guard = guard
        self._max_grad_norm = max_grad_norm
        self._parameters = stepped_parameters(wrapped_model, optimizer)
        # What the task returns besides losses; None before the first step.
        self._form: set[str] | None = None
        self.optimizer = optimizer
        self._recomputation = Recomputation(wrapped_model)

    def begin(self, position: TrainState, step_batch: StepBatch) -> None:
        """Begin the step after `position`: save the buffers, which forwards change.

        **Collective** with shards.
        """
        self._position = position
        self._step_batch = step_batch
        self._loss_gradient = self.strategy.gradient_factor / step_batch.num_samples
        self._micro_sums: list[StepSums] = []
        self.strategy.begin(self.buffers)
        self.buffers.save()

    def accumulate(self, task: Task, batch: Batch) -> None:
        """Run the forward and the backward of the next micro-batch. **Collective** in the last.

        Raises:
            ConfigError: the task returned something else than a StepOutput.
        """
        index = len(self._micro_sums)
        num_samples = len(batch)
        is_last = index == len(self._step_batch.micro_batches) - 1
        accelerator = self._accelerator
        self.strategy.begin_forward(self._position.optimizer_step, index)
        with _NO_CONTEXT if is_last else accelerator.no_sync(self.wrapped_model):
            with accelerator.autocast() if accelerator.native_amp else _NO_CONTEXT:
                output = task.step(self.wrapped_model, batch.at(self._step_batch.position))
            check_output(output, num_samples, has_graph=True)
            self._micro_sums.append(StepSums.of(output))
            losses = output.losses
            del output  # so that the backward can use the memory of what only metrics read
            self._backward(losses)
        self.strategy.end_backward(num_samples)

    def _backward(self, losses: Tensor) -> None:
        """Add the gradients of `losses.sum() * gradient_factor / num_samples`.

        The backward starts from the factor of each loss: computing the product and its backward
        would add 7 % to the step of a tiny model.
        """
        # Not kept for the next step: a hook on the losses may change it in place.
        gradient = torch.full_like(losses, self._loss_gradient)
        if self._accelerator.scaler is not None:
            losses = self._accelerator.scaler.scale(losses)
        with self._recomputation.undone(self.buffers.saved):
            torch.autograd.backward(losses, gradient)

    def finish(self) -> tuple[StepSums, Tensor | None, bool]:
        """Update the weights, unless the gradient is NaN or inf.

        **Collective. Host sync** with loss scaling.

        Return the sums to report, the norm [] before clipping (None without clipping), and whether
        the step was skipped: the weights did not change then.

        Raises:
            ConfigError: the task counts items, or has a number, only sometimes.
            DivergedError: a gradient is NaN or inf, and the run must end.
        """
        sums = self._reduce()
        grad_norm = None
        if self._max_grad_norm is not None:
            parameters = self.wrapped_model.parameters()
            norm = self._accelerator.clip_grad_norm_(parameters, self._max_grad_norm)
            grad_norm = local_part(norm)
        losses = [each.loss for each in self._micro_sums]
        update = PendingUpdate(self._position, self._step_batch, losses)
        if self._accelerator.scaler is not None:
            was_skipped = self._step_scaled(update, self._accelerator.scaler)
        else:
            was_skipped = self.guard.must_skip(update, grad_norm)
            if not was_skipped:
                self.optimizer.step()
        # As `zero_grad` does, without its profiler hooks, which add 7 % to the step of a tiny
        # model.
        for parameter in self._parameters:
            parameter.grad = None
        return sums, grad_norm, was_skipped

    def _reduce(self) -> StepSums:
        """Complete the gradients of the step, and return the sums to report. **Collective.**

        Backward has divided the gradients by the number of samples. If the task counts items, whose
        number is known only after the forwards, they are divided by the items of all processes
        instead. A step may have no item, if every token is padding.
        """
        self._check_form()
        sums, num_items = self.strategy.finish(self._micro_sums)
        if num_items is None:
            return sums
        # Not in bfloat16, which cannot represent 257. The guard finds the NaN of a negative number.
        num_items = num_items.to(torch.promote_types(self._parameters[0].dtype, torch.float))
        divisor = num_items.masked_fill(num_items == 0, 1).masked_fill(num_items < 0, torch.nan)
        ratio = self._step_batch.num_samples / divisor
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(ratio)
        return sums

    def _check_form(self) -> None:
        """Raise ConfigError if the task counts items, or has a number, only sometimes.

        **Collective. Host sync**, in the first step, which also refuses negative and NaN counts.

        A process without them would not take part in the collectives of the others.
        """
        forms = {
            ", ".join(["num_items"] * (each.num_items is not None) + [*each.numbers]) or "none"
            for each in self._micro_sums
        }
        differing = []
        if self._form is None:
            self._form = forms
            for each in self._micro_sums:
                # In later steps, the guard finds the NaN of the gradient.
                if each.num_items is not None and not each.num_items >= 0:  # negative, or NaN
                    raise ConfigError(
                        "NUM_ITEMS",
                        f"the task returned {float(each.num_items)} as num_items: return a count",
                    )
            if self._accelerator.num_processes > 1:
                differing = differing_lines("; ".join(sorted(forms)), self._accelerator)
        if len(forms | self._form) > 1 or any(differing):
            found = "; ".join(sorted({*forms, *self._form, *differing}))
            raise ConfigError(
                "NUM_ITEMS",
                f"the task returned num_items or numbers for some micro-batches only ({found}): "
                "return the same for all, num_items 0 where there are none",
            )

    def _step_scaled(self, update: PendingUpdate, scaler: GradScaler) -> bool:
        """Step the optimizer with loss scaling; return whether the step was skipped.

        An overflow, NaN or inf in a gradient skips it.
        """
        # A fused optimizer skips inside its kernel, which only the lowered scale shows.
        scale = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            return False
        self.buffers.restore()
        # NaN or inf in a loss of some process, which no loss scale fixes.
        is_bad = ~torch.isfinite(torch.stack([*update.losses])).all()
        if self._accelerator.reduce(is_bad.float()) > 0 or scaler.get_scale() < _MIN_LOSS_SCALE:
            self.guard.report(update)
        return True
