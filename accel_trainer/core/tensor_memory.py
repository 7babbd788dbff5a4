"""The memory layout of a model's tensors, on which in-place updates and fused kernels rely."""

from __future__ import annotations

import copy

import torch
import xxhash
from torch import Tensor, nn

from .digest import bytes_of, read_only_bytes
from .shards import local_part

_MAX_COPIED = 2**14  # bytes of a tensor on a device
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` fill a range of memory, each once, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def make_dense(model: nn.Module) -> None:
    """Move sliced or expanded parameters, and expanded buffers, to new dense memory.

    Fused kernels would write between the elements of a slice, and elements that share memory cannot
    be loaded. Buffers that are slices stay: they may be a part of another buffer on purpose.
    """
    expanded = [buffer for buffer in model.buffers() if 0 in buffer.stride()]
    for tensor in (*model.parameters(), *expanded):
        if not is_dense(tensor):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def tied_by_memory(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return pairs of a parameter and an earlier one with the same memory (`b.data = a.data`)."""
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

    Tensors that its modules have computed, such as the weight of torch's older `weight_norm`, are
    copied without their graph, which torch refuses to copy.
    """
    values = (value for module in model.modules() for value in vars(module).values())
    computed = {
        id(value): value.detach().clone()
        for value in values
        if isinstance(value, Tensor) and value.grad_fn
    }
    return copy.deepcopy(model, computed)


def address_of(tensor: Tensor) -> int:
    """Return where the memory of `tensor` begins, 0 if it has none.

    Unlike `data_ptr`, whose caller may write, this does not end the sharing of memory that is
    copied on the first write. A torch without this function shares none.
    """
    if not hasattr(torch._C, "_data_address"):
        return tensor.data_ptr()
    start = int(torch._C._data_address(tensor))  # of what the tensor may be a slice of
    return start and start + int(tensor.storage_offset()) * tensor.itemsize


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum [] int64 of the elements, whose bits are read as integers.

    Unlike a sum of floats, it is the same on any number of threads.
    """
    # 8 bytes as two halves: the sum of whole ones wraps, and would not show two changed signs.
    return bytes_of(tensor).view(_INTEGERS.get(tensor.itemsize, torch.int32)).sum()


def quick_digest(tensor: Tensor) -> tuple[int, int]:
    """Return what shows whether this process's part of a tensor has changed. **Host sync.**

    It is a hash of all bytes in memory, which takes a millisecond for 40 MB. Those on a device
    would have to be copied, so it is the sum of their bits, and a hash of a sample.
    """
    part = local_part(tensor)
    if not part.is_contiguous():
        # As it lies in memory: to put channels_last into logical order takes longer than the hash.
        part = part.permute(sorted(range(part.ndim), key=part.stride, reverse=True))
    flat = bytes_of(part)
    if flat.is_cpu:
        return 0, xxhash.xxh3_64_intdigest(read_only_bytes(flat))
    # An odd step, which meets each byte of an element.
    sample = read_only_bytes(flat[:: flat.numel() // _MAX_COPIED | 1])
    return int(sum_of_bits(part)), xxhash.xxh3_64_intdigest(sample)
