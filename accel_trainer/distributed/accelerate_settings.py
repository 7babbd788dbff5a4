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

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_PRECISIONS = ("no", "bf16", "fp16")
_FSDP = "ACCELERATE_USE_FSDP"
_FSDP_2 = "set it to 2, as in fsdp.yaml"
_OTHER_LAUNCH = "launch with multi_gpu.yaml, or with fsdp.yaml to shard the weights"
_LOADERS = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
_NO_LOADERS = "leave it out: the batch plan gives each process its part of every batch"

Row = tuple[bool, str, str]  # whether the unsupported setting is used, its name, what to do instead


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
    shards, unsupported = _FSDP in engines, sorted(engines - {_FSDP, "ACCELERATE_USE_CPU"})
    _reject(
        *[(True, name.removeprefix("ACCELERATE_USE_").lower(), _OTHER_LAUNCH) for name in unsupported],
        (mixed_precision not in _PRECISIONS, f"mixed_precision: {mixed_precision}", "set it to no, bf16 or fp16"),
        (shards and version != "2", f"fsdp_version: {version}", _FSDP_2),
        ("ACCELERATE_FP8_BACKEND" in environ, "fp8_config", "leave it out and set mixed_precision to bf16"),
    )
    with accelerates_errors():
        # accelerate's launcher switches on `cpu_ram_efficient_loading`, which fails with the buffers of batch norms
        # (1.15). Without it every process builds the same weights.
        return FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False) if shards else None


def reject_unsupported(accelerator: Accelerator) -> None:
    """Raise ConfigError for a setting of `accelerator` that would fail, or silently train another model.

    As of accelerate 1.15 and torch 2.13.
    """
    state, kind = accelerator.state, accelerator.distributed_type
    _reject(
        (kind not in _TYPES, f"distributed_type: {kind.value}", _OTHER_LAUNCH),
        (state.parallelism_config is not None, "parallelism_config", _OTHER_LAUNCH),
    )
    precision = accelerator.mixed_precision
    dynamo, num_steps = state.dynamo_plugin.backend, accelerator.gradient_accumulation_steps
    loaders = {name: (getattr(accelerator, name), default) for name, default in _LOADERS.items()}
    _reject(
        (precision not in _PRECISIONS, f"mixed_precision: {precision}", "set it to no, bf16 or fp16"),
        (dynamo != DynamoBackend.NO, f"dynamo_backend: {dynamo.value}", "set it to 'no' and use --compile"),
        (num_steps != 1, f"gradient_accumulation_steps: {num_steps}", "set it to 1 and use --accumulate"),
        *[(value != default, f"{name}={value}", _NO_LOADERS) for name, (value, default) in loaders.items()],
    )
    if kind == DistributedType.FSDP:
        _reject_fsdp(state.fsdp_plugin)


def _reject_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy  # slow to import

    second = "set it to false, since the second forward draws another dropout and updates batch norms again"
    recompute = f"{second}: call torch.utils.checkpoint in the model's forward"
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    ignored = "leave it out: their gradients would not be averaged over the processes"
    _reject(
        (plugin.fsdp_version != 2, f"fsdp_version: {plugin.fsdp_version}", _FSDP_2),
        (bool(plugin.activation_checkpointing), "fsdp_activation_checkpointing", recompute),
        (offloads, "fsdp_offload_params", "set it to false and shard over more processes"),
        (bool(plugin.ignored_modules), "fsdp_ignored_modules", ignored),
    )


@contextmanager
def accelerates_errors() -> Iterator[None]:
    """Raise accelerate's errors of settings, such as a missing library or a bad value, as a ConfigError."""
    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        reason = " ".join(str(error).split())
        fact = f"accelerate refuses its settings ({reason})"
        raise ConfigError("LAUNCH", f"{fact}: use those of a preset in accelerate_configs/") from error


def forget_earlier_accelerators() -> None:
    """Reset accelerate's state: the next `Accelerator()` of this process may have other settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _reject(*rows: Row) -> None:
    for is_used, setting, instead in rows:
        if is_used:
            raise ConfigError("LAUNCH", f"accelerate's {setting} is not supported: {instead}")
