"""The optimizers of a run, their parameters, and the values of weights before a trial."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .shards import is_shard

Optimizers = Mapping[str, Optimizer]
"""The optimizers of a run by name; the only one of a run that names none is called ""."""


def named_parts(optimizers: Optimizers) -> Optimizers:
    """Return the optimizers by the names under which checkpoints store them."""
    return {"optimizer" + f"-{name}" * bool(name): each for name, each in optimizers.items()}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of `optimizer`, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def stepped_parameters(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Return the parameters that the `optimizers` step by name, in the order of `model`.

    It is the same on all processes, which that of an optimizer need not be.
    """
    stepped = {each for optimizer in optimizers.values() for each in parameters_of(optimizer)}
    return {name: each for name, each in model.named_parameters() if each in stepped}


def unstepped_parameters(model: nn.Module, optimizers: Optimizers) -> set[str]:
    """Return all names of the parameters that no optimizer steps, but for shards."""
    stepped = set(stepped_parameters(model, optimizers).values())
    return {
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if each not in stepped and not is_shard(each)
    }


@contextmanager
def preserved_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Restore the values of the parameters, bit for bit, after the block."""
    parameters = parameters_of(optimizer)
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


@contextmanager
def preserved_weights(model: nn.Module) -> Iterator[None]:
    """Restore the parameters and listed buffers of `model`, bit for bit, after the block."""
    live = copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(live)
