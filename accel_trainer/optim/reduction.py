"""How the micro-batches of a step, on all processes, become one gradient: in the fastest order, or in a fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.batch_plan import BatchPlan
from ..core.errors import ConfigError
from ..core.rng import fold_in, seed_forward
from ..core.types import StepOutput
from ..distributed.collectives import broadcast, sum_pairwise, sum_rows
from ..distributed.fsdp import is_sharded


class FloatReduction:
    """Lets backward add up the micro-batches, and DDP or FSDP average over the processes during the last backward.

    The backward of a micro-batch is that of `loss_sum * loss_scale / num_samples`, those of all processes.
    """

    def __init__(self, accelerator: Accelerator, *, seed: int) -> None:
        self._accelerator, self.loss_scale = accelerator, accelerator.num_processes
        self._process_key, self._device = fold_in(seed, accelerator.process_index), accelerator.device

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return both, prepared by accelerate. **Collective.**"""
        return self._accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]  # accelerate is untyped

    def begin(self) -> None:
        """Begin a step."""

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Seed what is random in the forward of micro-batch `index` of this process."""
        seed_forward(self._process_key, optimizer_step=optimizer_step, micro_batch=index, device=self._device)

    def end_backward(self, num_samples: int) -> None:
        """End a micro-batch of `num_samples`, which may be none: backward has added up the gradients."""

    def finish(
        self, losses: Sequence[Tensor], sums: Sequence[Mapping[str, Tensor]], items: Sequence[Tensor | None]
    ) -> tuple[StepOutput, Tensor | None]:
        """Let the parameters have the step's gradients, and add up the micro-batches' numbers ([] each).

        Return the sums to report, which are those of the step when added up over the processes, and the items of all
        processes if they are counted. **Collective** if they are.
        """
        counts = [count for count in items if count is not None]
        num_items = total(counts) if counts else None
        output = StepOutput(total(losses), {name: total([part[name] for part in sums]) for name in sums[0]}, num_items)
        return output, None if num_items is None else self._accelerator.reduce(num_items, reduction="sum")


class ExactReduction:
    """Adds up the micro-batches of all processes in pairs: the same bits on any number of processes.

    Gradients, running statistics and logged numbers are taken from each micro-batch by itself. A parameter without a
    gradient has one of zeros. Each micro-batch begins with the running statistics of the step's beginning and
    normalises by itself; afterwards they are the mean over the micro-batches. As update rules of running statistics
    are linear, this is one update by the mean of all means and variances.

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
        self._buffers = list(model.buffers())
        self._statistics = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        with torch.no_grad():
            for tensor in (*model.parameters(), *self._buffers):
                tensor.copy_(broadcast(tensor, self._accelerator))
        return model, self._accelerator.prepare_optimizer(optimizer)

    def begin(self) -> None:
        """Save the running statistics."""
        self._tree = PairwiseSum()
        self._saved = [buffer.clone() for buffer in self._buffers]

    def begin_forward(self, optimizer_step: int, index: int) -> None:
        """Restore the running statistics, and seed by step and the micro-batch's place in it."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(saved)
        part, device = self._first_part + index, self._accelerator.device
        seed_forward(self._key, optimizer_step=optimizer_step, micro_batch=part, device=device)

    @torch.no_grad()
    def end_backward(self, num_samples: int) -> None:
        """Move gradients and running statistics to the tree; without samples, zeros and those of the beginning."""
        is_empty, statistics = num_samples == 0, self._statistics
        if is_empty:
            statistics = [saved for saved in self._saved if saved.is_floating_point()]
        gradients = [torch.zeros_like(p) if is_empty or p.grad is None else p.grad for p in self._parameters]
        self._tree.add([*gradients, *(buffer.clone() for buffer in statistics)])
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(
        self, losses: Sequence[Tensor], sums: Sequence[Mapping[str, Tensor]], items: Sequence[Tensor | None]
    ) -> tuple[StepOutput, Tensor | None]:
        """Return the sums of the step on the main process, zeros on the others. **Collective.**"""
        counts = [count for count in items if count is not None]
        columns = [losses, *([part[name] for part in sums] for name in sums[0]), *([counts] if counts else [])]
        numbers = [sum_rows(torch.stack(list(column))) for column in columns]
        totals = self._tree.total()
        _sum_over_processes([*totals, *numbers], self._accelerator)
        num_parameters = len(self._parameters)
        for parameter, gradient in zip(self._parameters, totals[:num_parameters], strict=True):
            parameter.grad = gradient
        for buffer, statistic in zip(self._statistics, totals[num_parameters:], strict=True):
            buffer.copy_(statistic / self._num_parts)
        mine = numbers if self._accelerator.is_main_process else [torch.zeros_like(number) for number in numbers]
        named = dict(zip(sums[0], mine[1:], strict=False))
        return StepOutput(mine[0], named, mine[-1] if counts else None), numbers[-1] if counts else None


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
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        mine = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
        sum_pairwise(flat, accelerator)
        for tensor, values in zip(mine, flat.split([tensor.numel() for tensor in mine]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def total(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, of a single one without an operation."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
