"""One optimizer step: it takes place as a whole, or leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ...core.buffers import StepBuffers
from ...core.errors import ConfigError, listed
from ...core.parameters import Optimizers, stepped_parameters
from ...core.shards import local_part
from ...core.timing import Stopwatch
from ...core.train_state import TrainState
from ...core.types import Batch, Gradients, Position, StepBatch, StepSums, Task, Turn
from ...distributed.collectives import differing_lines
from ...fault_tolerance.activity import Activity
from ..strategy.base import Strategy
from ..tasks.task_output import check_output
from .backward import backward
from .nonfinite_check import choose_check
from .nonfinite_report import NonfiniteReport, PendingUpdate
from .recomputation import Recomputation
from .turns import in_turn, others_frozen, out_of_turn

Notify = Callable[..., None]
"""Calls the hook that the first argument names, with the other arguments."""

Form = tuple[str, ...]
"""What a task returns for a micro-batch besides losses, by name."""

Forwards = tuple[list[StepSums], list[Tensor]]
"""What the forwards of a step returned, by micro-batch: their sums, and their samples [B]."""

_NO_CONTEXT = nullcontext()


@dataclass(eq=False)
class OptimizerStep:
    """Takes the steps of a run: `compute_gradients`, perhaps more than once, `apply_gradients`.

    `wrapped_model` is what `strategy.prepare` returned for `model`. accelerate's wrapper of the
    optimizer would only call torch's and the GradScaler's methods, as `check` does, and takes
    nearly as long as the step of a tiny model (accelerate 1.15).

    `check` steps the optimizers, unless a gradient is NaN or inf.
    """

    strategy: Strategy
    _: KW_ONLY
    task: Task
    model: nn.Module
    wrapped_model: nn.Module
    optimizers: Optimizers
    nonfinite: NonfiniteReport
    activity: Activity
    max_grad_norm: float | None
    max_grad_value: float | None
    check_every_n_steps: int | None

    def __post_init__(self) -> None:
        self.data_wait = Stopwatch()
        self._accelerator = self.strategy.accelerator
        self._buffers = StepBuffers(self.model)
        self._parameters = stepped_parameters(self.model, self.optimizers)
        self._recomputation = Recomputation(self._buffers)
        self._position: Position | None = None
        """Where the step begins whose gradients have been computed; None after their update."""
        self._is_computing = False
        # The updates of the step in progress, how many have been made, and whose turn it is.
        self.updates: list[Turn] = [""]
        self.num_updates = 0
        self.turn: Turn = ""
        # What the task returns besides losses; nothing before the first step.
        self._forms: set[Form] = set()
        check = choose_check(self.strategy, optimizers=self.optimizers, report=self.nonfinite)
        self.check = check(
            self.strategy,
            optimizers=self.optimizers,
            parameters=[*self._parameters.values()],
            buffers=self._buffers,
            report=self.nonfinite,
        )

    # --- the gradients ---

    def compute_gradients(self, step_batch: StepBatch, notify: Notify | None) -> Gradients:
        """Return the gradients of a step, and leave none in the parameters.

        **Collective. Host sync** with `--check-every`.

        Each call of a step starts from the buffers at its beginning, and the first call decides
        which ones it ends with, and is the only one that observers see: they would count a sample
        again. The generators of all processes are the same afterwards.

        Raises:
            ConfigError: the task returned something else than a StepOutput, or counts items, or has
                a number, only sometimes; or it is called twice in a step with loss scaling.
        """
        self._refuse_leftovers()
        self._is_computing = True
        compute: Callable[[StepBatch, Notify | None], Gradients] = self._compute_again
        if step_batch.position != self._position:
            self._position = step_batch.position
            compute = self._compute
        if step_batch.turn:
            compute = others_frozen(self.optimizers, step_batch.turn)(compute)
        gradients = compute(step_batch, notify)
        self._is_computing = False
        return gradients

    def _compute(self, step_batch: StepBatch, notify: Notify | None) -> Gradients:
        """Compute the first gradients of a step."""
        self.strategy.begin(self._buffers)
        self._buffers.save()
        every = self.check_every_n_steps
        run = self._run
        if every is not None and (step_batch.position.step + 1) % every == 0:
            # A loader may give each micro-batch only once.
            step_batch = step_batch._replace(micro_batches=[*step_batch.micro_batches])
            run = self._run_checked
        return self._collect(step_batch, *run(step_batch, notify))

    def _compute_again(self, step_batch: StepBatch, _: Notify | None) -> Gradients:
        """Compute gradients from the beginning of the step, such as at changed weights."""
        if self._accelerator.scaler is not None:
            raise ConfigError(
                "TRAINER",
                "compute_gradients is called twice in a step, which does not work with "
                "--mixed-precision fp16: use bf16",
            )
        after_first = self._buffers.copy_current()
        self._restart()
        gradients = self._collect(step_batch, *self._run(step_batch, None))
        after_first.put_back()
        return gradients

    def _collect(
        self, step_batch: StepBatch, micro_sums: list[StepSums], sample_ids: list[Tensor]
    ) -> Gradients:
        """Return the gradients that a step's forwards left in the parameters that have the turn."""
        sums = self._reduce(micro_sums, step_batch)
        if self._accelerator.scaler is not None:
            for optimizer in in_turn(self.optimizers, step_batch.turn).values():
                # As accelerate's `unscale_gradients` does.
                self._accelerator.scaler.unscale_(optimizer)
        gradients = self._take_gradients()
        # The same on all processes, unlike in the forwards.
        self.strategy.begin_update(step_batch.position.step)
        losses = [each.loss for each in micro_sums]
        return Gradients(gradients, sums, step_batch, losses, sample_ids)

    def _run_checked(self, step_batch: StepBatch, notify: Notify | None) -> Forwards:
        """Run the micro-batches twice, and compare the bits. Observers see the second run."""
        from .step_check import check_repeats  # few runs check

        self.check.settle()
        return check_repeats(
            partial(self._run, step_batch, None),
            partial(self._run, step_batch, notify),
            self._restart,
            number=step_batch.position.step + 1,
            model=self.model,
            accelerator=self._accelerator,
        )

    def _refuse_leftovers(self) -> None:
        """Raise ConfigError for what would be added to the gradients, and is in no checkpoint."""
        if self._is_computing:
            raise ConfigError(
                "TRAINER",
                "compute_gradients is called again after it has failed: "
                "let its error end the run, which then resumes from its checkpoint",
            )
        if found := [name for name, each in self._parameters.items() if each.grad is not None]:
            raise ConfigError(
                "TRAINER",
                f"your own backward has left a gradient in {listed(found)}, to which "
                "the step would add: use torch.autograd.grad, or set .grad to None",
            )

    def _restart(self) -> None:
        """Go back to the beginning of the step, but for the weights."""
        self._buffers.restore()
        self.strategy.begin(self._buffers)

    def _run(self, step_batch: StepBatch, notify: Notify | None) -> Forwards:
        """Run the forward and the backward of each micro-batch. **Collective.**"""
        micro_sums: list[StepSums] = []
        sample_ids: list[Tensor] = []
        num_left = len(step_batch.micro_batches)
        for batch in self.data_wait.around(step_batch.micro_batches):
            self.activity.num_forwards += 1
            num_left -= 1
            batch = batch.at(step_batch.position, step_batch.turn)
            if notify is not None:
                notify("before_micro_batch", batch)
            self.strategy.begin_forward(step_batch.position.step, len(micro_sums))
            factor = self.strategy.gradient_factor / step_batch.num_samples
            run = self._run_micro_batch
            if num_left:
                run = self._accelerator.no_sync(self.wrapped_model)(run)
            micro_sums.append(run(batch, factor, notify))
            self.strategy.end_backward(len(batch))
            sample_ids.append(batch.sample_ids)
        return micro_sums, sample_ids

    def _run_micro_batch(self, batch: Batch, factor: float, notify: Notify | None) -> StepSums:
        """Add the gradients of `losses.sum() * factor`. **Collective** in the last of a step.

        A sum over the step has the strategy's own factor.

        The backward starts from the factor of each loss: computing the product and its backward
        would add 7 % to the step of a tiny model.
        """
        accelerator = self._accelerator
        with accelerator.autocast() if accelerator.native_amp else _NO_CONTEXT:
            output = self.task.step(self.wrapped_model, batch)
        check_output(output, len(batch), has_graph=True)
        sums = StepSums.of(output)
        if notify is not None:
            notify("on_micro_batch", batch, output.detached())
        losses = output.losses
        if output.reduction == "sum":
            factor = self.strategy.gradient_factor
        del output  # so that the backward can use the memory of what only metrics read
        # Not kept for the next step: a hook on the losses may change it in place.
        gradient = torch.full_like(losses, factor)
        self._recomputation.begin_backward()
        backward(losses, gradient, accelerator)
        self._recomputation.end_backward()
        return sums

    def _reduce(self, micro_sums: list[StepSums], step_batch: StepBatch) -> StepSums:
        """Complete the gradients of the step, and return the sums to report. **Collective.**

        Backward has divided the gradients by the number of samples. If the task counts items, whose
        number is known only after the forwards, they are divided by the items of all processes
        instead. A step may have no item, if every token is padding.
        """
        self._check_form(micro_sums)
        sums, num_items = self.strategy.finish(micro_sums)
        if num_items is None:
            return sums
        # Not in bfloat16, which cannot represent 257. The check finds the NaN of a negative number.
        dtype = next(iter(self._parameters.values())).dtype
        num_items = num_items.to(torch.promote_types(dtype, torch.float))
        divisor = num_items.masked_fill(num_items == 0, 1).masked_fill(num_items < 0, torch.nan)
        ratio = step_batch.num_samples / divisor
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(ratio)
        return sums

    def _check_form(self, micro_sums: list[StepSums]) -> None:
        """Raise ConfigError if the task counts items, sums, or has a number, only sometimes.

        **Collective. Host sync**, in the first step, which also refuses negative and NaN counts.

        A process without them would not take part in the collectives of the others.
        """
        forms: set[Form] = {(each.kind, *each.numbers) for each in micro_sums}
        if forms == self._forms:
            return
        differing: dict[int, str] = {}
        if not self._forms:
            self._forms = forms
            for each in micro_sums:
                # In later steps, the check finds the NaN of the gradient.
                if each.num_items is not None and not each.num_items >= 0:  # negative, or NaN
                    raise ConfigError(
                        "NUM_ITEMS",
                        f"the task returned {float(each.num_items)} as num_items: return a count",
                    )
            differing = differing_lines(_named(forms), self._accelerator)
        if len(forms | self._forms) > 1 or differing:
            found = "; ".join(sorted({_named(forms | self._forms), *differing.values()}))
            raise ConfigError(
                "NUM_ITEMS",
                f"the task returned num_items or numbers for some micro-batches only ({found}): "
                "return the same for all, num_items 0 where there are none",
            )

    def _take_gradients(self) -> dict[str, Tensor | None]:
        gradients = {}
        for name, parameter in self._parameters.items():
            gradients[name] = parameter.grad
            parameter.grad = None
        return gradients

    # --- the update ---

    def apply_gradients(
        self, position: TrainState, gradients: Gradients
    ) -> tuple[Tensor | None, bool]:
        """Update the weights after `position`, unless a gradient is NaN or inf. **Collective.**

        **Host sync** with loss scaling, and unless the check is deferred.

        Raises:
            ConfigError: the gradients do not fit the parameters, or have no turn.
            DivergedError: a gradient is NaN or inf, and the run must end.
        """
        self._position = None
        tensors, turn = gradients.tensors, gradients.step_batch.turn
        if self._parameters.keys() != tensors.keys():
            differing = self._parameters.keys() ^ tensors.keys()
            raise ConfigError(
                "TRAINER",
                f"gradients are missing, or of no parameter: {listed(differing)}: "
                "give one for each name that compute_gradients returned, None for no gradient",
            )
        for name, parameter in self._parameters.items():
            try:
                parameter.grad = tensors[name]
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    "TRAINER",
                    f"the gradient of {name} does not fit ({error}): "
                    "keep its shape, dtype and device",
                ) from error
        if turn:
            self._refuse_out_of_turn(turn)
        grad_norm = None
        if self.max_grad_norm is not None or self.max_grad_value is not None:
            # Without a bound, the norm still tells of an inf, which the other clipping would hide.
            grad_norm = local_part(self._clip(self.max_grad_norm or math.inf))
        if self.max_grad_value is not None:
            clipped = [local_part(p.grad) for p in self._parameters.values() if p.grad is not None]
            torch._foreach_clamp_min_(clipped, -self.max_grad_value)
            torch._foreach_clamp_max_(clipped, self.max_grad_value)
        update = PendingUpdate(position, gradients.step_batch, gradients.losses)
        was_skipped = self.check.apply(update, grad_norm)
        # As `zero_grad` does, without its profiler hooks, which add 7 % to the step of a tiny
        # model.
        for parameter in self._parameters.values():
            parameter.grad = None
        self.num_updates += 1
        return grad_norm, was_skipped

    def _refuse_out_of_turn(self, turn: Turn) -> None:
        others = out_of_turn(self.optimizers, turn)
        named = self._parameters.items()
        if found := [name for name, each in named if each in others and each.grad is not None]:
            raise ConfigError(
                "TRAINER",
                f"gradients of parameters whose optimizer has no turn now: {listed(found)}: "
                "leave them None, or return that optimizer in the task's turn, too",
            )

    def _clip(self, max_norm: float) -> Tensor:
        """Return the norm [] before clipping."""
        # accelerate's function would unscale the gradients a second time.
        is_scaled = self._accelerator.scaler is not None
        clip = clip_grad_norm_ if is_scaled else self._accelerator.clip_grad_norm_
        # Not those of the model: nothing clears a gradient that no optimizer steps by.
        return clip(self._parameters.values(), max_norm)


def _named(forms: set[Form]) -> str:
    return "; ".join(sorted(", ".join(filter(None, form)) or "none" for form in forms))
