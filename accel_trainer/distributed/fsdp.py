"""Sharded weights (FSDP2): whole tensors for a checkpoint, and back to shards.

With FULL_STATE_DICT a checkpoint holds whole tensors, gathered to the main process one by one: its files are the same
for any number of processes, sharded or not, and the main machine needs host memory for one copy of the state. With
SHARDED_STATE_DICT each process writes its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, convert_outputs_to_fp32, fsdp2_prepare_model, fsdp_utils
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigError
from ..core.tensor_memory import copy_model

_FIX = "launch with multi_gpu.yaml"
# torch uses the weights of their parts without calling these: `out_proj`, or in evaluation all.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the prepared model's weights are shards."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether each process writes its shards to a checkpoint: `fsdp_state_dict_type` is SHARDED_STATE_DICT."""
    return is_sharded(accelerator) and accelerator.state.fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def sharded_copy(model: nn.Module, accelerator: Accelerator) -> nn.Module | None:
    """Return a copy of a placed `model`, sharded as `prepare` will shard the model; None if it does not."""
    if not is_sharded(accelerator):
        return None
    copied = copy_model(model)
    if accelerator.native_amp:  # `place_model` has set the `forward` of the original
        del copied.forward
        copied.forward = convert_outputs_to_fp32(accelerator.autocast()(copied.forward))
    with own_units():
        return fsdp2_prepare_model(accelerator, copied)  # type: ignore[no-any-return]  # accelerate is untyped


@contextmanager
def own_units() -> Iterator[None]:
    """Let accelerate shard by itself only a module that is called, and that has all uses of its weights.

    accelerate 1.15 takes every module of enough weights: lists of modules too, which torch refuses as they have no
    forward, parts of attention, whose weights are used without a call, and weights that other modules use as well.

    Raises ConfigError where accelerate's own choice, as of embeddings, still divides tied weights.
    """
    choose = fsdp_utils.fsdp2_prepare_auto_wrap_policy

    def choose_called(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        is_chosen, called = choose(plugin, model), called_modules(model)
        return None if is_chosen is None else lambda module: module in called and is_chosen(module)

    fsdp_utils.fsdp2_prepare_auto_wrap_policy = choose_called
    try:
        yield
    except ValueError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError("FSDP", f"the weights cannot be sharded ({reason}): {_FIX}") from error
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = choose


def called_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that have a forward of their own, and all uses of their weights."""
    inside = {part for module in model.modules() if isinstance(module, _WHOLE) for part in [*module.modules()][1:]}
    uses = _count_uses(model)
    candidates = [module for module in model.modules() if type(module).forward is not nn.Module.forward]
    return {module for module in candidates if module not in inside and _count_uses(module).items() <= uses.items()}


def _count_uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


def reject_optimizer_with_fsdp(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot step shards."""
    name = type(optimizer).__name__
    # Adafactor and Rprop: "in-place operations that require placement changes are not supported" (torch 2.13).
    if optimizer.state or name in ("Adafactor", "Rprop"):
        why = "has state before its first step" if optimizer.state else "needs whole weights"
        raise ConfigError("FSDP", f"{name} {why}, and does not work with FSDP: use another optimizer, or {_FIX}")


def make_shardable(model: nn.Module) -> None:
    """Let the parameters be contiguous. Raises ConfigError for one that cannot be sharded."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError("FSDP", f"{name} has no dimension, and cannot be sharded: give it the shape [1]")
        parameter.data = parameter.data.contiguous()


def reject_options_with_fsdp(accelerator: Accelerator, options: Mapping[str, object]) -> None:
    """Raise ConfigError for the first of `options`, by flag, that is on and needs whole weights."""
    for flag, value in options.items() if is_sharded(accelerator) else ():
        if value:
            raise ConfigError("FSDP", f"{flag} does not work with FSDP: leave it out, or {_FIX}")


def gather_shards(state: Any) -> Any:
    """Return `state` with whole tensors on the main process's host in place of shards. **Collective** with shards.

    On the other processes shards stay: they have the shapes and dtypes of the whole.
    """
    if isinstance(state, Mapping):
        return {key: gather_shards(value) for key, value in state.items()}
    if not is_shard(state):
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else state


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a part of a whole."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes 0.5 s


def place_in_whole(shard: DTensor) -> tuple[list[int], list[int]]:
    """Return where this process's shard begins in the whole, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return list(offsets), list(shape)


def as_shard(mine: DTensor, local: Tensor) -> Tensor:
    """Return `local`, this process's part of a whole, as a shard placed as `mine`."""
    from torch.distributed.tensor import DTensor

    mesh, placements, local = mine.device_mesh, mine.placements, local.to(mine.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=mine.shape, stride=mine.stride())


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
