"""Sharded weights (FSDP2): whole tensors for a checkpoint, and back to shards.

With FULL_STATE_DICT a checkpoint holds whole tensors, gathered to the main process one by one: its
files are the same for any number of processes, sharded or not, and the main machine needs host
memory for one copy of the state. With SHARDED_STATE_DICT each process writes its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32, fsdp2_prepare_model, fsdp_utils
from torch import nn
from torch.optim import Optimizer

from ..core.errors import ConfigError
from ..core.shards import is_shard
from ..core.tensor_memory import copy_model, tied_by_memory

_FIX = "launch with multi_gpu.yaml"
# torch uses the weights of their parts without calling these: `out_proj`, or in evaluation all.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether each process writes its shards to a checkpoint: `fsdp_state_dict_type` is SHARDED_STATE_DICT."""
    return bool(accelerator.state.fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT")


def sharded_copy(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a copy of a placed `model`, sharded as `prepare` will shard the model.

    **Collective.**
    """
    copied = copy_model(model)
    if accelerator.native_amp:  # `place_model` has set the `forward` of the original
        del copied.forward
        copied.forward = convert_outputs_to_fp32(accelerator.autocast()(copied.forward))
    with own_units(copied):
        return fsdp2_prepare_model(accelerator, copied)  # type: ignore[no-any-return]  # accelerate is untyped


@contextmanager
def own_units(model: nn.Module) -> Iterator[None]:
    """Let accelerate shard by itself only a module that is called, and that has all uses of its weights.

    accelerate 1.15 takes every module of enough weights: lists of modules too, which torch refuses
    as they have no forward, parts of attention, whose weights are used without a call, and weights
    that other modules use as well. Of models of transformers it also takes embeddings and the last
    norm, which another unit may have already.
    """
    choose, find_norm = fsdp_utils.fsdp2_prepare_auto_wrap_policy, fsdp_utils._find_final_norm

    def choose_called(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        is_chosen, called = choose(plugin, model), called_modules(model)
        return None if is_chosen is None else lambda module: module in called and is_chosen(module)

    fsdp_utils.fsdp2_prepare_auto_wrap_policy = choose_called
    fsdp_utils._find_final_norm = lambda model: None
    vars(model).update(dict.fromkeys(_EMBEDDINGS, lambda: None))
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy, fsdp_utils._find_final_norm = choose, find_norm
        for name in _EMBEDDINGS:
            del vars(model)[name]


def called_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that have a forward of their own, and all uses of their weights."""
    inside = {
        part
        for module in model.modules()
        if isinstance(module, _WHOLE)
        for part in [*module.modules()][1:]
    }
    uses = _count_uses(model)
    candidates = [
        module for module in model.modules() if type(module).forward is not nn.Module.forward
    ]
    return {
        module
        for module in candidates
        if module not in inside and _count_uses(module).items() <= uses.items()
    }


def _count_uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )


def reject_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot step shards."""
    name = type(optimizer).__name__
    # Adafactor and Rprop: "in-place operations that require placement changes are not supported"
    # (torch 2.13).
    if optimizer.state or name in ("Adafactor", "Rprop"):
        why = "has state before its first step" if optimizer.state else "needs whole weights"
        raise ConfigError(
            "FSDP", f"{name} {why}, and does not work with FSDP: use another optimizer, or {_FIX}"
        )


def make_shardable(model: nn.Module, accelerator: Accelerator) -> None:
    """Let the parameters of a placed `model` be contiguous, and settle how accelerate divides it.

    Raises:
        ConfigError: a parameter cannot be sharded, or the model is to be divided by a class that it
            has not.
    """
    if ties := tied_by_memory(model):
        (tied,) = (name for name, parameter in model.named_parameters() if parameter is ties[0][0])
        fix = "let both modules have one parameter, as in b.weight = a.weight"
        raise ConfigError(
            "FSDP", f"{tied} shares its memory with another parameter, which shards cannot: {fix}"
        )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                "FSDP", f"{name} has no dimension, and cannot be sharded: give it the shape [1]"
            )
        parameter.data = parameter.data.contiguous()
    plugin = accelerator.state.fsdp_plugin
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise ConfigError(
            "LAUNCH", f"fsdp_transformer_layer_cls_to_wrap does not fit: {error}"
        ) from error
    if accelerator.native_amp:
        # accelerate 1.15 would cast the weights instead, and those of norms then do not fit their
        # buffers.
        plugin.mixed_precision_policy = None
        model.forward = convert_outputs_to_fp32(accelerator.autocast()(model.forward))


def gather_shards(state: Any) -> Any:
    """Return `state` with whole tensors on the main process's host in place of shards.

    **Collective** with shards.

    On the other processes shards stay: they have the shapes and dtypes of the whole.
    """
    if isinstance(state, Mapping):
        return {key: gather_shards(value) for key, value in state.items()}
    if not is_shard(state):
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state


def reject_options(options: Mapping[str, object]) -> None:
    """Raise ConfigError for the first of `options`, by flag, that is on and needs whole weights."""
    for flag, value in options.items():
        if value:
            raise ConfigError("FSDP", f"{flag} does not work with FSDP: leave it out, or {_FIX}")
