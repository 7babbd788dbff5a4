"""The settings of accelerate that are supported: a closed list. Any other is refused before it changes a number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.environment import str_to_bool

from .errors import ConfigError

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_PRECISIONS = ("no", "bf16", "fp16")
# What these variables switch on, as accelerate's YAML spells it.
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "distributed_type: DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "distributed_type: MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
    "ACCELERATE_USE_SAGEMAKER": "compute_environment: AMAZON_SAGEMAKER",
}
_FSDP_2 = "set it to 2, as in fsdp.yaml"
_OTHER_LAUNCH = "launch with multi_gpu.yaml, or with fsdp.yaml to shard the weights"
_LOADERS = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
_NO_LOADERS = "leave it out: the batch plan gives each process its part of every batch"

Row = tuple[bool, str, str]  # whether a setting is in use that is not supported; the setting; what to do instead


def is_switched_on(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable of accelerate's is true, as accelerate reads it. Raises ConfigError: neither."""
    value = environ.get(variable) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise ConfigError("LAUNCH", f"{variable} is {value}: set it to true or false") from None


def read_launch(mixed_precision: str) -> FullyShardedDataParallelPlugin | None:
    """Return how the launch asks to shard the weights; None: not at all.

    Called before the processes join, so that all of them refuse it alike.

    Raises:
        ConfigError: the environment asks for something that is not supported.
    """
    environ, version = os.environ, os.environ.get("FSDP_VERSION", "1")
    engines = {name for name in environ if name.startswith("ACCELERATE_USE_") and is_switched_on(name, environ)}
    unsupported = engines - {"ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"}
    _reject(
        # What accelerate would only meet as a missing library; engines that it does not have yet, too.
        *[(True, _ENGINES.get(name, name), _OTHER_LAUNCH) for name in sorted(unsupported)],
        ("ACCELERATE_USE_FSDP" in engines and version != "2", f"fsdp_version: {version}", _FSDP_2),
        ("ACCELERATE_FP8_BACKEND" in environ, "fp8_config", "leave it out and set mixed_precision to bf16"),
    )
    with accelerates_errors():
        # accelerate's launcher asks for `cpu_ram_efficient_loading` by itself, which fails with the buffers of batch
        # norms (1.15); every process builds the same weights without it.
        shards = "ACCELERATE_USE_FSDP" in engines
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False) if shards else None
        backend = TorchDynamoPlugin().backend
        accumulation_steps = int(environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))
    _reject_training(mixed_precision, backend, accumulation_steps, plugin)
    return plugin


def reject_unsupported(accelerator: Accelerator) -> None:
    """Raise ConfigError for the first setting of `accelerator`, whoever made it, that is not supported."""
    state, kind = accelerator.state, accelerator.distributed_type
    _reject(
        (kind not in _TYPES, f"distributed_type: {kind.value}", _OTHER_LAUNCH),
        (state.parallelism_config is not None, "parallelism_config", _OTHER_LAUNCH),
    )
    plugin = state.fsdp_plugin if kind == DistributedType.FSDP else None
    backend, accumulation_steps = state.dynamo_plugin.backend, accelerator.gradient_accumulation_steps
    _reject_training(accelerator.mixed_precision, backend, accumulation_steps, plugin)
    loaders = {name: (getattr(accelerator, name), default) for name, default in _LOADERS.items()}
    _reject(*[(value != default, f"{name}={value}", _NO_LOADERS) for name, (value, default) in loaders.items()])


@contextmanager
def accelerates_errors() -> Iterator[None]:
    """Raise as a ConfigError what accelerate says of settings, which may be a missing library or a bad value."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, NotImplementedError, ValueError) as error:
        reason = " ".join(str(error).split())
        fix = "take the settings of a preset in accelerate_configs/"
        raise ConfigError("LAUNCH", f"accelerate refuses its settings ({reason}): {fix}") from error


def forget_earlier_accelerators() -> None:
    """Let the next `Accelerator()` of this process have other settings than the last."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _reject(*rows: Row) -> None:
    for is_used, setting, instead in rows:
        if is_used:
            raise ConfigError("LAUNCH", f"accelerate's {setting} is not supported: {instead}")


def _reject_training(
    precision: str, backend: DynamoBackend, accumulation_steps: int, plugin: FullyShardedDataParallelPlugin | None
) -> None:
    """Raise ConfigError for what would fail, or would quietly train another model (accelerate 1.15, torch 2.13)."""
    _reject(
        (precision not in _PRECISIONS, f"mixed_precision: {precision}", "set it to no, bf16 or fp16"),
        (backend != DynamoBackend.NO, f"dynamo_backend: {backend.value}", "set it to 'no' and use --compile"),
        (accumulation_steps != 1, f"gradient_accumulation_steps: {accumulation_steps}", "set it to 1: --accumulate"),
    )
    if plugin is None:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy  # 0.5 s of a start that does not shard

    recompute = (
        "set it to false, since the second forward draws another dropout and updates batch norms again: call "
        "torch.utils.checkpoint in the model's forward"
    )
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    ignored = "leave it out: their gradients would not be averaged over the processes"
    _reject(
        (plugin.fsdp_version != 2, f"fsdp_version: {plugin.fsdp_version}", _FSDP_2),
        (bool(plugin.activation_checkpointing), "fsdp_activation_checkpointing", recompute),
        (offloads, "fsdp_offload_params", "set it to false and shard over more processes"),
        (bool(plugin.ignored_modules), "fsdp_ignored_modules", ignored),
    )
