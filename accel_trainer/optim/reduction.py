"""How the micro-batches of a step, on all processes, become one gradient: in the fastest order, or in a fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.batch_plan import BatchPlan
from ..core.buffers import BufferCopy, Place, buffer_places, buffers_at
from ..core.errors import ConfigError
from ..core.rng import fold_in, seed_forward
from ..core.types import StepOutput
from ..distributed.collectives import (
    all_gather,
    broadcast,
    copy_from_main,
    exchange_together,
    sum_pairwise,
    sum_rows,
)
from ..distributed.fsdp import is_sharded, own_units, reject_optimizer_with_fsdp


class FloatReduction:
    """Lets backward add up the micro-batches, and DDP or FSDP average over the processes during the last backward.

    The backward of a micro-batch is that of `loss_sum * loss_scale / num_samples`, those of all processes.
    """

    def __init__(self, accelerator: Accelerator, *, seed: int) -> None:
        self._accelerator, self.loss_scale = accelerator, accelerator.num_processes
        self._process_key, self._device = fold_in(seed, accelerator.process_index), accelerator.device

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return both, prepared by accelerate. **Collective.**"""
        self._sent: list[Place] = []
        if is_sharded(self._accelerator):
            reject_optimizer_with_fsdp(optimizer)
            self._sent = list(buffer_places(model).values())  # DDP sends them before the first forward of a step
        elif self._accelerator.num_processes > 1:
            _keep_strides(model)
        with own_units():
            return self._accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]  # accelerate is untyped

    def begin(self) -> None:
        """Let all processes have the main process's buffers, which a checkpoint holds. **Collective** with shards."""
        if self._sent:
            copy_from_main(buffers_at(self._sent), self._accelerator)

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Seed what is random in the forward of micro-batch `index` of this process."""
        seed_forward(self._process_key, optimizer_step=optimizer_step, micro_batch=index, device=self._device)

    def end_backward(self, num_samples: int) -> None:
        """End a micro-batch of `num_samples`, which may be none: backward has added up the gradients."""

    def finish(
        self, losses: Sequence[Tensor], sums: Sequence[Mapping[str, Tensor]], counts: Sequence[Tensor]
    ) -> tuple[StepOutput, Tensor | None]:
        """Let the parameters have the step's gradients, and add up the micro-batches' numbers ([] each).

        Return the sums to report, which are those of the step when added up over the processes, and the items of all
        processes if they are counted. **Collective** if they are.
        """
        num_items = total(counts) if counts else None
        output = StepOutput(total(losses), {name: total([part[name] for part in sums]) for name in sums[0]}, num_items)
        return output, None if num_items is None else self._accelerator.reduce(num_items, reduction="sum")


def _keep_strides(model: nn.Module) -> None:
    """Let the gradients of filters that are laid out both ways have the filter's strides.

    Filters of one channel or of 1x1 have the same memory in both layouts, and only the strides tell them apart. DDP
    warns of a gradient with the other strides (torch 2.13), and those of a filter decide how it is computed.
    """
    for parameter in model.parameters():
        is_both = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
        if parameter.requires_grad and is_both and parameter.is_contiguous():
            parameter.register_hook(partial(_with_strides, strides=parameter.stride()))


def _with_strides(gradient: Tensor, *, strides: tuple[int, ...]) -> Tensor:
    return gradient.contiguous().as_strided(gradient.shape, strides)


class ExactReduction:
    """Adds up the micro-batches of all processes in pairs: the same bits on any number of processes.

    Gradients, running statistics and logged numbers are taken from each micro-batch by itself. A parameter without a
    gradient has one of zeros. Each micro-batch begins with the running statistics of the step's beginning and
    normalises by itself; afterwards they are the mean over the micro-batches. As update rules of running statistics
    are linear, this is one update by the mean of all means and variances. For integers see `CounterChanges`.

    Raises ConfigError for what shards, scales or compresses gradients.
    """

    loss_scale = 1

    def __init__(self, accelerator: Accelerator, *, seed: int, num_parts: int) -> None:
        handler = accelerator.ddp_handler
        unsupported = {
            "FSDP": is_sharded(accelerator),
            "--mixed-precision fp16": accelerator.scaler is not None,
            "--runtime.gradient-compression": handler is not None and handler.comm_hook.value != "no",
        }
        for name, is_used in unsupported.items():
            if is_used:
                raise ConfigError("REDUCE", f"--reduce exact does not work with {name}: remove one of them")
        self._accelerator, self._num_parts, self._key = accelerator, num_parts, fold_in(seed, 0)
        self._first_part = accelerator.process_index * num_parts // accelerator.num_processes

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Leave the model unwrapped, with the main process's weights. Raises ConfigError for a SyncBatchNorm."""
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            fact = "--reduce exact normalises each micro-batch by itself, and the model has a SyncBatchNorm"
            raise ConfigError("REDUCE", f"{fact}: use BatchNorm instead")
        # `evaluation_mode` leaves out DDP, which would add up in an order of its own.
        model = self._accelerator.prepare_model(model, evaluation_mode=True)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places = buffer_places(model)
        self._statistics = {name: place for name, place in places.items() if not is_counter(getattr(*place))}
        self._counters = CounterChanges(model, self._accelerator)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(broadcast(tensor, self._accelerator))
        copy_from_main(buffers_at([*places.values()]), self._accelerator)
        self._saved = BufferCopy([*self._statistics.values()])
        return model, self._accelerator.prepare_optimizer(optimizer)

    def begin(self) -> None:
        """Save the running statistics."""
        self._tree = PairwiseSum()
        self._saved.take()
        self._counters.begin()

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Restore the running statistics, and seed by step and the micro-batch's place in it."""
        self._saved.put_back()
        self._counters.put_back()
        part, device = self._first_part + index, self._accelerator.device
        seed_forward(self._key, optimizer_step=optimizer_step, micro_batch=part, device=device)

    @torch.no_grad()
    def end_backward(self, num_samples: int) -> None:
        """Move gradients and running statistics to the tree; without samples, zeros and those of the beginning."""
        is_empty = num_samples == 0
        statistics = self._saved.tensors if is_empty else buffers_at([*self._statistics.values()])
        gradients = [torch.zeros_like(p) if is_empty or p.grad is None else p.grad for p in self._parameters]
        self._tree.add([*gradients, *(buffer.clone() for buffer in statistics)])
        self._counters.add_part(num_samples)
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(
        self, losses: Sequence[Tensor], sums: Sequence[Mapping[str, Tensor]], counts: Sequence[Tensor]
    ) -> tuple[StepOutput, Tensor | None]:
        """Return the sums of the step on the main process, zeros on the others. **Collective.**"""
        columns = [losses, *([part[name] for part in sums] for name in sums[0]), *([counts] if counts else [])]
        numbers = [sum_rows(torch.stack(list(column))) for column in columns]
        totals = self._tree.total()
        _sum_over_processes([*totals, *numbers], self._accelerator)
        num_parameters = len(self._parameters)
        for parameter, gradient in zip(self._parameters, totals[:num_parameters], strict=True):
            parameter.grad = gradient
        self._saved.put_back()
        for (name, place), mean in zip(self._statistics.items(), totals[num_parameters:], strict=True):
            (buffer,) = buffers_at([place])
            if buffer.shape != mean.shape:
                change = f"{list(buffer.shape)} to {list(mean.shape)}"
                fact = f"a forward changes the shape of the buffer {name} from {change}"
                raise ConfigError("REDUCE", f"{fact}: let it keep its shape for --reduce exact, or use --reduce float")
            buffer.copy_(mean / self._num_parts)
        self._counters.apply()
        mine = numbers if self._accelerator.is_main_process else [torch.zeros_like(number) for number in numbers]
        named = dict(zip(sums[0], mine[1:], strict=False))
        return StepOutput(mine[0], named, mine[-1] if counts else None), numbers[-1] if counts else None


class CounterChanges:
    """What the micro-batches of a step change in the integer buffers of `model`: counters, pointers, flags.

    Each begins with the values of the step's beginning. Their sum would be wrong for a pointer, and one change wrong
    for a counter of samples. So a change is applied once if it is the same in all micro-batches that have samples, and
    what the model names in `summed_buffers` changes by the sum.

    Raises ConfigError for a name that is none.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._places = {name: place for name, place in buffer_places(model).items() if is_counter(getattr(*place))}
        self._summed, self._accelerator = getattr(model, "summed_buffers", ()), accelerator
        for name in self._summed:
            if name not in self._places:
                fix = f"name some of {', '.join(self._places)}" if self._places else "remove it"
                raise ConfigError("REDUCE", f"the model's summed_buffers has {name}, no integer buffer: {fix}")
        self._saved = BufferCopy([*self._places.values()])

    def begin(self) -> None:
        """Begin a step."""
        self._parts: list[Tensor] = []
        self._saved.take()

    def put_back(self) -> None:
        """Restore the values of the step's beginning."""
        self._saved.put_back()

    def add_part(self, num_samples: int) -> None:
        """Note the changes of a micro-batch."""
        pairs = zip(buffers_at([*self._places.values()]), self._saved.tensors, strict=True)
        changes = [(now.long() - before.long()).reshape(-1) for now, before in pairs]
        self._parts.append(torch.cat([*changes, torch.tensor([num_samples], device=self._accelerator.device)]))

    def apply(self) -> None:
        """Apply the changes of the step. **Collective**, and **Host sync**, if there are integer buffers.

        Raises:
            ConfigError: micro-batches change a buffer differently, and the model does not name it.
        """
        if not self._places:
            return
        parts = all_gather(torch.stack(self._parts), self._accelerator).flatten(0, 1)
        parts = parts[parts[:, -1] > 0]
        self._saved.put_back()
        buffers = buffers_at([*self._places.values()])
        changes = parts[:, :-1].split([buffer.numel() for buffer in buffers], dim=1)
        for name, buffer, change in zip(self._places, buffers, changes, strict=True):
            is_summed = name in self._summed
            if not is_summed and (differs := (change != change[0]).any(0)).any():
                few, many = change[:, differs][:, 0].aminmax()
                fact = (
                    f"the integer buffer {name} changes by {few} in one micro-batch of a step and by {many} in another"
                )
                fix = f"set summed_buffers = ({name!r},) on the model if the changes add up, or use --reduce float"
                raise ConfigError("REDUCE", f"{fact}, which --reduce exact cannot merge: {fix}")
            buffer.copy_(buffer.long() + (change.sum(0) if is_summed else change[0]).view(buffer.shape))


def is_counter(buffer: Tensor) -> bool:
    """Whether a buffer holds integers or flags."""
    return not (buffer.is_floating_point() or buffer.is_complex())


Reduction = FloatReduction | ExactReduction


def build_reduction(plan: BatchPlan, accelerator: Accelerator, *, seed: int) -> Reduction:
    """Return the reduction that `plan` asks for. Raises ConfigError if it cannot be exact."""
    if plan.reduce == "exact":
        return ExactReduction(accelerator, seed=seed, num_parts=plan.num_parts)
    return FloatReduction(accelerator, seed=seed)


class PairwiseSum:
    """Adds up lists of tensors, as many as a power of two: neighbours in pairs, then the sums of pairs, and so on.

    It keeps one partial sum for each level of this tree.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[Tensor]]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Add the next list, which may be changed from now on."""
        level = 0
        while self._partial and self._partial[-1][0] == level:
            _, before = self._partial.pop()
            torch._foreach_add_(before, tensors)
            tensors, level = before, level + 1
        self._partial.append((level, tensors))

    def total(self) -> list[Tensor]:
        """Return the sum of all."""
        ((_, tensors),) = self._partial
        return tensors


def _sum_over_processes(tensors: Sequence[Tensor], accelerator: Accelerator) -> None:
    """Replace each tensor by its sum over the processes, in pairs; one exchange for each dtype. **Collective.**"""
    if accelerator.num_processes == 1:
        return

    def exchange(flat: Tensor) -> Tensor:
        sum_pairwise(flat, accelerator)
        return flat

    exchange_together(tensors, exchange)


def total(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, of a single one without an operation."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
