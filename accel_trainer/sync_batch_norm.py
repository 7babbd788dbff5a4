"""Batch normalisation over the batch of all processes, on any device.

torch's SyncBatchNorm refuses the CPU ("expected input tensor to be on GPU", torch 2.13), and its conversion turns each
subclass of a BatchNorm into a plain one, without what it adds. Here a BatchNorm of torch itself becomes torch's fused
version on CUDA; every other keeps its own forward, in which `batch_norm` spans all processes by plain autograd over a
differentiable all-reduce. So one, two or four processes train the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as FusedSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from .errors import ConfigError

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def convert_sync_batch_norm(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Let every BatchNorm of `model` span all processes, in training mode; parameters and names stay.

    Raises:
        ConfigError: a subclass of torch's SyncBatchNorm, which needs a GPU, and `device` is none.
    """
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, device=device))
    is_cuda, is_synced = device.type == "cuda", isinstance(model, nn.SyncBatchNorm)
    if type(model) in _OF_TORCH and is_cuda:
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    if is_synced and not is_cuda and type(model) is not nn.SyncBatchNorm:
        fix = "give the model its BatchNorm, which is computed over all processes as well"
        raise ConfigError("SYNC_BATCH_NORM", f"{type(model).__name__} is a SyncBatchNorm, which needs a GPU: {fix}")
    if isinstance(model, _BatchNorm) and not (is_synced and is_cuda):
        # Never compiled, since torch.compile loses the mode (torch 2.13). A method, so that a copy of the module, as
        # that with the averaged weights, calls its own.
        forward = torch.compiler.disable(_forward_over_processes)
        model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    return model


def _forward_over_processes(norm: _BatchNorm, *inputs: Any, **options: Any) -> Any:
    """Call the forward of a BatchNorm's class. **Collective** in training mode."""
    forward = _BatchNorm.forward if isinstance(norm, nn.SyncBatchNorm) else type(norm).forward
    if not norm.training or not dist.is_initialized():
        return forward(norm, *inputs, **options)
    with _BatchNormOverProcesses() as mode:
        output = forward(norm, *inputs, **options)
    if not mode.was_reached:
        fact = f"{type(norm).__name__} does not normalise by F.batch_norm, and so not over all processes"
        fix = "leave its statistics to each process with --runtime.no-sync-batch-norm"
        raise ConfigError("SYNC_BATCH_NORM", f"{fact}: {fix}")
    return output


class _BatchNormOverProcesses(TorchFunctionMode):
    """Lets `F.batch_norm` take the statistics of all processes' rows, wherever it is called in the block."""

    was_reached = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_norm = func is F.batch_norm
        self.was_reached |= is_norm
        return (batch_norm if is_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return what `F.batch_norm` of the rows of all processes gives to those of this one. **Collective** in training.

    Shapes and arguments are those of torch's.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.device.type == "cuda":
        group, num_processes = dist.group.WORLD, dist.get_world_size()
        statistics = running_mean, running_var, eps, momentum
        return cast(Tensor, FusedSyncBatchNorm.apply(input, weight, bias, *statistics, group, num_processes))
    over = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1] + [1] * (input.dim() - 2)
    count = torch.full((1,), input.numel() // input.shape[1], dtype=torch.float64, device=input.device)
    # float64 sums: the mean and variance then do not depend on how rows are dealt out to processes.
    sums = _sum_over_processes(torch.cat([input.double().sum(over), count]))
    total = sums[-1].detach()
    if input.numel() <= input.shape[1] and total == 1:  # as torch does: the output would not depend on the input
        raise ValueError(f"Expected more than 1 value per channel when training, got {list(input.shape)}")
    mean = sums[:-1] / total
    dtype = torch.promote_types(input.dtype, torch.float32)
    centered = input.to(dtype) - mean.to(dtype).view(shape)
    variance = _sum_over_processes(centered.double().square().sum(over)) / total
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * total / (total - 1).clamp(min=1)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    output = centered * torch.rsqrt(variance + eps).to(dtype).view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(input.dtype)


class _SumOverProcesses(torch.autograd.Function):
    """An all-reduce, whose gradient is the all-reduce of the gradients. **Collective**, forward and backward.

    torch's own are deprecated or private (`torch.distributed.nn.functional`, torch 2.13).
    """

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _sum_over_processes(gradient)


def _sum_over_processes(values: Tensor) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(values)  # type: ignore[no-untyped-call]
    return total
