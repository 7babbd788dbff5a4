"""The settings of accelerate that are supported: a closed list. Any other is an error before it changes a result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from accelerate.utils.environment import str_to_bool

from ..core.errors import ConfigError
from .launch_env import check_not_alone

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_PRECISIONS = ("no", "bf16", "fp16")
_FSDP = "ACCELERATE_USE_FSDP"
_FSDP_2 = "set it to 2, as in fsdp.yaml"
_OTHER_LAUNCH = "launch with multi_gpu.yaml, or with fsdp.yaml to shard the weights"


def is_switched_on(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable is true, as accelerate reads it. Raises ConfigError if it is neither true nor false."""
    value = environ.get(variable) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise ConfigError("LAUNCH", f"{variable} is {value}: set it to true or false") from None


def read_launch(mixed_precision: str) -> FullyShardedDataParallelPlugin | None:
    """Return the launch's FSDP settings; None: without FSDP.

    Raises ConfigError for what accelerate itself could only report as a missing library or an unknown value.
    """
    environ, version = os.environ, os.environ.get("FSDP_VERSION", "1")
    engines = {name for name in environ if name.startswith("ACCELERATE_USE_") and is_switched_on(name, environ)}
    unsupported = sorted(engines - {_FSDP, "ACCELERATE_USE_CPU"})
    _reject(
        *[(name.removeprefix("ACCELERATE_USE_").lower(), True, _OTHER_LAUNCH) for name in unsupported],
        (f"mixed_precision: {mixed_precision}", mixed_precision not in _PRECISIONS, "set it to no, bf16 or fp16"),
        (f"fsdp_version: {version}", _FSDP in engines and version != "2", _FSDP_2),
    )
    with accelerates_errors():
        # accelerate's launcher switches on `cpu_ram_efficient_loading`, which fails with the buffers of batch norms
        # (1.15). Without it every process builds the same weights.
        return FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False) if _FSDP in engines else None


def reject_unsupported(accelerator: Accelerator) -> None:
    """Raise ConfigError for a setting of `accelerator` that would fail, or silently train another model.

    As of accelerate 1.15 and torch 2.13.
    """
    check_not_alone(accelerator.num_processes)
    state, kind = accelerator.state, accelerator.distributed_type
    _reject((f"distributed_type: {kind.value}", kind not in _TYPES, _OTHER_LAUNCH))
    dynamo, num_steps = state.dynamo_plugin.backend, accelerator.gradient_accumulation_steps
    _reject(
        ("parallelism_config", state.parallelism_config is not None, _OTHER_LAUNCH),
        (f"dynamo_backend: {dynamo.value}", dynamo != DynamoBackend.NO, "set it to 'no' and use --compile"),
        (f"gradient_accumulation_steps: {num_steps}", num_steps != 1, "set it to 1 and use --accumulate"),
    )
    if kind == DistributedType.FSDP:
        _reject_fsdp(state.fsdp_plugin)


def _reject_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy  # slow to import

    # A second forward would draw another dropout and update batch norms again.
    recompute = "set it to false: call torch.utils.checkpoint in the model's forward"
    ignored = "leave it out: their gradients would not be averaged over the processes"
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    _reject(
        (f"fsdp_version: {plugin.fsdp_version}", plugin.fsdp_version != 2, _FSDP_2),
        ("fsdp_activation_checkpointing", plugin.activation_checkpointing, recompute),
        ("fsdp_offload_params", offloads, "set it to false and shard over more processes"),
        ("fsdp_ignored_modules", plugin.ignored_modules, ignored),
    )


@contextmanager
def accelerates_errors() -> Iterator[None]:
    """Raise accelerate's errors of settings, such as a missing library or a bad value, as a ConfigError."""
    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("LAUNCH", f"accelerate rejects its settings ({reason}): use those of a preset") from error


def forget_earlier_accelerators() -> None:
    """Reset accelerate's state: the next `Accelerator()` of this process may have other settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _reject(*rows: tuple[str, object, str]) -> None:
    """Raise ConfigError for the first setting that is used, with what to do instead."""
    for setting, is_used, instead in rows:
        if is_used:
            raise ConfigError("LAUNCH", f"accelerate's {setting} is not supported: {instead}")
