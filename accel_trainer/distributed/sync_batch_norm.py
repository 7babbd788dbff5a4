"""Batch normalisation over all processes, on any device, so that their number changes no model.

torch's SyncBatchNorm needs a GPU (torch 2.13), and its conversion replaces a subclass of BatchNorm
by the plain class. Here torch's own BatchNorms become the fused SyncBatchNorm on CUDA. All others
keep their forward, with `F.batch_norm` replaced by a version with a differentiable all-reduce.
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

from ..core.errors import ConfigError
from .differentiable import sum_with_gradient

_TORCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def convert_sync_batch_norm(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Make every BatchNorm in `model` normalise over all processes in training mode.

    Parameters and names stay. Returns the model, or its replacement if it is itself a BatchNorm.
    """
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, device=device))
    is_cuda = device.type == "cuda"
    if type(model) in _TORCH_NORMS and is_cuda:
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    if isinstance(model, _BatchNorm) and not (is_cuda and isinstance(model, nn.SyncBatchNorm)):
        # Not compiled, since torch.compile loses the mode (torch 2.13). A method, so that a deep
        # copy of the module, such as the one for averaged weights, calls its own.
        forward = torch.compiler.disable(_forward_over_processes)
        model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    return model


def _forward_over_processes(norm: _BatchNorm, *inputs: Any, **options: Any) -> Any:
    """Call the forward of a BatchNorm's class. **Collective** in training mode."""
    # torch's SyncBatchNorm itself refuses to train on a CPU.
    forward = _BatchNorm.forward if type(norm) is nn.SyncBatchNorm else type(norm).forward
    if not norm.training or not dist.is_initialized():
        return forward(norm, *inputs, **options)
    with _BatchNormOverProcesses() as mode:
        output = forward(norm, *inputs, **options)
    if not mode.was_reached:
        raise ConfigError(
            "SYNC_BATCH_NORM",
            f"{type(norm).__name__} does not call F.batch_norm, and so cannot normalise over all "
            "processes: set --runtime.no-sync-batch-norm",
        )
    return output


class _BatchNormOverProcesses(TorchFunctionMode):
    """Replaces `F.batch_norm` by `batch_norm` over all processes, in its `with` block."""

    was_reached = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_norm = func is F.batch_norm
        self.was_reached |= is_norm
        return (batch_norm if is_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return this process's rows of `F.batch_norm` over the rows of all processes.

    **Collective** in training. Shapes and arguments are those of `F.batch_norm`.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.is_cuda:
        output = FusedSyncBatchNorm.apply(
            input,
            weight,
            bias,
            running_mean,
            running_var,
            eps,
            momentum,
            dist.group.WORLD,
            dist.get_world_size(),
        )
        return cast(Tensor, output)
    over = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1] + [1] * (input.dim() - 2)
    # Sums in float64, so that mean and variance do not depend on the split over processes.
    mine = input.double().sum(over)
    count = mine.new_full((1,), input.numel() // input.shape[1])
    sums = sum_with_gradient(torch.cat([mine, count]))
    total = sums[-1].detach()
    if input.numel() <= input.shape[1] and total == 1:  # torch refuses this, too
        raise ConfigError(
            "SHAPES",
            f"Expected more than 1 value per channel when training, got {list(input.shape)}: "
            "leave out the last samples of an epoch with --batch.drop-last",
        )
    mean = sums[:-1] / total
    dtype = torch.promote_types(input.dtype, torch.float32)
    centered = input.to(dtype) - mean.to(dtype).view(shape)
    variance = sum_with_gradient(centered.double().square().sum(over)) / total
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
