"""Sharded weights (FSDP2): which modules are sharded, and whole tensors for a checkpoint.

With FULL_STATE_DICT a checkpoint holds whole tensors, gathered to the main process one by one: its
files are the same for any number of processes, sharded or not, and the main machine needs host
memory for one copy of the state. With SHARDED_STATE_DICT each process writes its shards.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
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

# Their forwards use the weights of submodules without calling them: `out_proj`, in evaluation all.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether `fsdp_state_dict_type` makes each process write its shards to a checkpoint."""
    return bool(accelerator.state.fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT")


def sharded_copy(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a copy of a placed `model`, sharded as `prepare` will shard the model itself.

    **Collective.**
    """
    copied = copy_model(model)
    if accelerator.native_amp:  # `make_shardable` set `forward` on the original
        del copied.forward
        copied.forward = convert_outputs_to_fp32(accelerator.autocast()(copied.forward))
    with own_units(copied):
        return fsdp2_prepare_model(accelerator, copied)  # type: ignore[no-any-return]  # accelerate is untyped


@contextmanager
def own_units(model: nn.Module) -> Iterator[None]:
    """Make accelerate shard separately only modules that `called_modules` returns.

    accelerate 1.15 chooses every module with enough weights. That includes lists of modules, which
    torch refuses because they have no forward; submodules of attention, whose weights are used
    without a call; and modules whose weights others use as well. In models of transformers it also
    chooses embeddings and the last norm, which another unit may have already.
    """
    choose = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    find_norm = fsdp_utils._find_final_norm

    def choose_called(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        is_chosen = choose(plugin, model)
        called = called_modules(model)
        return None if is_chosen is None else lambda module: module in called and is_chosen(module)

    fsdp_utils.fsdp2_prepare_auto_wrap_policy = choose_called
    fsdp_utils._find_final_norm = lambda model: None
    vars(model).update(dict.fromkeys(_EMBEDDINGS, lambda: None))
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = choose
        fsdp_utils._find_final_norm = find_norm
        for name in _EMBEDDINGS:
            del vars(model)[name]


def called_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that define a forward and whose weights are used only inside them."""
    inside = {
        part
        for module in model.modules()
        if isinstance(module, _WHOLE)
        for part in [*module.modules()][1:]
    }
    uses = _count_uses(model).items()
    return {
        module
        for module in model.modules()
        if type(module).forward is not nn.Module.forward
        and module not in inside
        and _count_uses(module).items() <= uses
    }


def _count_uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )


def reject_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot update sharded weights."""
    name = type(optimizer).__name__
    # Adafactor and Rprop: "in-place operations that require placement changes are not supported"
    # (torch 2.13).
    if optimizer.state or name in ("Adafactor", "Rprop"):
        why = "has state before its first step" if optimizer.state else "needs whole weights"
        raise ConfigError(
            "FSDP",
            f"{name} {why}, and does not work with FSDP: "
            "use another optimizer, or launch with multi_gpu.yaml",
        )


def reject_dtypes(sharded: nn.Module) -> None:
    """Raise ConfigError for a unit with trained weights of several dtypes: torch needs one."""
    unit_of = {
        parameter: module
        for module in sharded.modules()  # the inner ones last
        if hasattr(module, "unshard")
        for parameter in module.parameters()
    }
    first: dict[nn.Module, Any] = {}
    for name, parameter in sharded.named_parameters():
        if parameter.requires_grad:
            other, dtype = first.setdefault(unit_of[parameter], (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ConfigError(
                    "FSDP",
                    f"{name} is {parameter.dtype} and {other} {dtype}, and cannot be sharded "
                    "together: give them the same dtype, or launch with multi_gpu.yaml",
                )


def make_shardable(model: nn.Module, accelerator: Accelerator) -> None:
    """Make the parameters of a placed `model` contiguous, and set how accelerate divides it.

    Raises:
        ConfigError: a parameter cannot be sharded, or the model has no module of the class by which
            it is to be divided.
    """
    tied = dict(tied_by_memory(model))
    for name, parameter in model.named_parameters():
        if parameter in tied:
            raise ConfigError(
                "FSDP",
                f"{name} shares its memory with a different parameter, which FSDP cannot shard: "
                "give both modules the same parameter, as in b.weight = a.weight",
            )
        if not (parameter.ndim and parameter.numel()):
            raise ConfigError(
                "FSDP", f"{name} has the shape {[*parameter.shape]}, and cannot be sharded: use [1]"
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
        # accelerate 1.15 would cast the weights instead: the weights of norms would not fit their
        # buffers.
        plugin.mixed_precision_policy = None
        model.forward = convert_outputs_to_fp32(accelerator.autocast()(model.forward))


def gather_shards(state: Any) -> Any:
    """Return `state` with whole tensors in host memory in place of shards, on the main process.

    **Collective** with shards.

    The other processes keep the shards, which report the shape and dtype of the whole.
    """
    # Not accelerate's `recursively_apply`: it makes other containers anew, and fails for some.
    if type(state) in (dict, OrderedDict):
        return {key: gather_shards(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(gather_shards, state))
    if not is_shard(state):
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state
