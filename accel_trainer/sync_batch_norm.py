"""Batch normalisation over the batch of all processes, on any device.

torch's SyncBatchNorm refuses the CPU ("expected input tensor to be on GPU", torch 2.13). This one is
plain autograd over a differentiable all-reduce, so that one, two or four CPU processes train the same
model. On CUDA torch's fused version is used.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


class CpuSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Normalises [B, C, ...] by the statistics of all processes' rows. **Collective** in training mode.

    B may differ between processes and may be 0.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, same shape."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        over = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = torch.tensor([float(input.numel() // input.shape[1])], dtype=torch.float64)
        # float64 sums: the mean and variance then do not depend on how rows are dealt out to processes.
        sums = _sum_over_processes(torch.cat([input.double().sum(over), count]))
        total = sums[-1].detach()
        if total == 1:  # as torch does: the output would not depend on the input
            raise ValueError(f"Expected more than 1 value per channel when training, got {list(input.shape)}")
        mean = sums[:-1] / total
        dtype = torch.promote_types(input.dtype, torch.float32)
        centered = input.to(dtype) - mean.to(dtype).view(shape)
        variance = _sum_over_processes(centered.double().square().sum(over)) / total
        self._update_running(mean.detach(), variance.detach(), total)
        output = centered * torch.rsqrt(variance + self.eps).to(dtype).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * total / (total - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def convert_sync_batch_norm(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Replace every BatchNorm of `model` by one that spans all processes; parameters and names stay."""
    if device.type == "cuda":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, device=device))
    if not isinstance(model, nn.modules.batchnorm._BatchNorm):
        return model
    synced = CpuSyncBatchNorm(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        setattr(synced, name, tensor)
    return synced.train(model.training)
