"""The memory of a model's tensors: what updates in place, and fused kernels, rely on."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` fill a range of memory, each element once, in whatever order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def make_dense(model: nn.Module) -> None:
    """Give parameters that are slices or expanded, and buffers that are expanded, dense memory of their own.

    Fused kernels would write between the elements of a slice, and elements that share memory cannot
    be loaded. Buffers that are slices stay: they may be a part of another buffer on purpose.
    """
    expanded = [buffer for buffer in model.buffers() if 0 in buffer.stride()]
    for tensor in (*model.parameters(), *expanded):
        if not is_dense(tensor):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def tied_by_memory(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the parameters that are another one's memory (`b.data = a.data`), each with that other one."""
    first: dict[object, nn.Parameter] = {}
    pairs = []
    for parameter in model.parameters():
        place = (parameter.device, parameter.data_ptr(), parameter.shape, parameter.stride())
        other = first.setdefault(place, parameter)
        if other is not parameter and parameter.numel():
            pairs.append((parameter, other))
    return pairs


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of `model`.

    Of tensors that its modules have computed, such as the weight of torch's older `weight_norm`,
    the copy has the values: torch refuses to copy their graph.
    """
    computed = [
        v
        for module in model.modules()
        for v in vars(module).values()
        if isinstance(v, Tensor) and v.grad_fn
    ]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})
