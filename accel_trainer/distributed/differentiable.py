"""Collectives with a gradient; torch's are deprecated or private (2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from ..core.errors import ConfigError


class _SumOverProcesses(torch.autograd.Function):
    """A differentiable all-reduce. **Collective**, forward and backward."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return sum_with_gradient(gradient)


sum_with_gradient = cast(Callable[[Tensor], Tensor], _SumOverProcesses.apply)
"""Returns the sum over the processes; so is the gradient. **Collective**, and so is its backward.

Needs a process group.
"""


def gather_with_gradient(tensor: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the tensors [b, ...] of all processes as one [B, ...], in the order of the processes.

    **Collective**, and so is its backward. **Host sync** with several processes.

    b may differ by process, and may be 0. The dtype is kept; integers have no gradient. The
    gradient of a process's samples is the sum of the gradients that all processes have for them,
    by an all-reduce, as DDP adds up those of the weights. So if the losses of each process are
    those of its own samples among all B, a step has the gradient of the whole batch. A single
    process gets `tensor` itself.

    Raises:
        ConfigError: the samples have different shapes on different processes.
    """
    if accelerator.num_processes == 1:
        return tensor
    shape = torch.tensor([tensor.shape], device=accelerator.device)
    sizes, *others = accelerator.gather(shape).T.tolist()
    if any(len(set(lengths)) > 1 for lengths in others):
        raise ConfigError(
            "SHAPES",
            f"gather_with_gradient got {list(tensor.shape)}, but samples on a different process "
            "have a different shape: pad them to the same shape",
        )
    # Zeros in the places of the others, so that the sum has each sample once.
    parts = [tensor.new_zeros(size, *tensor.shape[1:]) for size in sizes]
    parts[accelerator.process_index] = tensor
    return sum_with_gradient(torch.cat(parts))
