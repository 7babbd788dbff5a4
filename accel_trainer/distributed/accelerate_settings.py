"""Settings of accelerate that are not supported: each is an error before it changes a result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from accelerate.utils.environment import str_to_bool

from ..core.errors import ConfigError

_TYPES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)
_OTHER_LAUNCH = "launch with multi_gpu.yaml, or with fsdp.yaml to shard the weights"


def is_switched_on(variable: str) -> bool:
    """Return whether an environment variable is true, as accelerate reads it.

    Raises ConfigError if it is neither true nor false.
    """
    value = os.environ.get(variable) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise ConfigError("LAUNCH", f"{variable} is {value}: set it to true or false") from None


def read_sharding() -> FullyShardedDataParallelPlugin | None:
    """Return the launch's FSDP settings; None without FSDP. Raises ConfigError for version 1."""
    if not is_switched_on("ACCELERATE_USE_FSDP"):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    # Version 1 would fail because a device is missing.
    _reject((f"fsdp_version: {version}", version != "2", "set it to 2, as in fsdp.yaml"))
    with launch_errors_explained():
        # accelerate's launcher switches on `cpu_ram_efficient_loading`, which fails with the
        # buffers of batch norms (1.15). Without it every process builds the same weights.
        return FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)


def reject_unsupported(accelerator: Accelerator) -> None:
    """Raise ConfigError for a setting that would silently change the result, or fail obscurely.

    As of accelerate 1.15 and torch 2.13. Settings that accelerate itself refuses are not checked.
    """
    state = accelerator.state
    kind = accelerator.distributed_type
    _reject((f"distributed_type: {kind.value}", kind not in _TYPES, _OTHER_LAUNCH))
    dynamo = state.dynamo_plugin.backend
    num_steps = accelerator.gradient_accumulation_steps
    _reject(
        ("mixed_precision: fp8", state.mixed_precision == "fp8", "set it to no, bf16 or fp16"),
        ("parallelism_config", state.parallelism_config is not None, _OTHER_LAUNCH),
        (
            f"dynamo_backend: {dynamo.value}",
            dynamo != DynamoBackend.NO,
            "set it to 'no' and use --compile",
        ),
        (
            f"gradient_accumulation_steps: {num_steps}",
            num_steps != 1,
            "set it to 1 and use --accumulate",
        ),
    )
    if kind == DistributedType.FSDP:
        from torch.distributed.fsdp import CPUOffloadPolicy  # slow to import

        plugin = state.fsdp_plugin
        _reject(
            # A second forward would draw another dropout and update batch norms again.
            (
                "fsdp_activation_checkpointing",
                plugin.activation_checkpointing,
                "set it to false: call torch.utils.checkpoint in the model's forward",
            ),
            (
                "fsdp_offload_params",
                isinstance(plugin.cpu_offload, CPUOffloadPolicy),
                "set it to false and shard over more processes",
            ),
            (
                "fsdp_ignored_modules",
                plugin.ignored_modules,
                "leave it out: their gradients would not be averaged over the processes",
            ),
        )


@contextmanager
def launch_errors_explained() -> Iterator[None]:
    """Turn accelerate's errors, such as a missing library or a bad value, into a ConfigError."""
    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            "LAUNCH",
            f"accelerate rejects its settings ({' '.join(str(error).split())}): "
            "use those of a preset",
        ) from error


def reset_accelerate() -> None:
    """Reset accelerate's state, so that the next `Accelerator()` may have other settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _reject(*rows: tuple[str, object, str]) -> None:
    """Raise ConfigError for the first row (setting, is used, what to do instead) that is used."""
    for setting, is_used, instead in rows:
        if is_used:
            raise ConfigError("LAUNCH", f"accelerate's {setting} is not supported: {instead}")
