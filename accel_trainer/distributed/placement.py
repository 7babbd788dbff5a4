"""The placement of a model: its device, memory layout, and norms synchronised over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import ConfigError
from ..core.tensor_memory import make_dense, tied_by_memory
from .sync_batch_norm import convert_sync_batch_norm

if TYPE_CHECKING:
    from .accelerator import RuntimeConfig


def place_model(model: nn.Module, accelerator: Accelerator, config: RuntimeConfig) -> nn.Module:
    """Move `model` to its device, and apply the memory layout and synchronised norms.

    The module keeps its class and the names of its parameters: it is wrapped for several processes
    later. Parameters that are views of larger tensors get their own memory.

    Raises:
        ConfigError: a parameter or buffer has no values yet, or a parameter sparse gradients.
    """
    _refuse_untrainable(model)
    ties = tied_by_memory(model)
    make_dense(model)
    model = model.to(accelerator.device)
    if config.channels_last:
        # `model.to(memory_format=...)` fails on the weights of 3-d convolutions (torch 2.13).
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    for parameter, other in ties:
        parameter.data = other.data
    if config.sync_batch_norm and accelerator.num_processes > 1:
        model = convert_sync_batch_norm(model, device=accelerator.device)
    return model


def _refuse_untrainable(model: nn.Module) -> None:
    """Raise ConfigError for what has no values yet, and for sparse gradients."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "MODEL",
                f"{name} has no shape yet: call the model with a batch before you pass it on",
            )
        if tensor.is_meta:
            raise ConfigError("MODEL", f"{name} is on the meta device: build the model on the CPU")
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            name = name or type(module).__name__
            raise ConfigError(
                "MODEL",
                f"{name} has sparse gradients, which cannot be checked for NaN: set sparse=False",
            )
