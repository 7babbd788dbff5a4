"""The settings of accelerate that are supported: a closed list. Any other is refused before it changes a number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
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

Unsupported = tuple[str, str]  # a setting with its value, and what to do instead


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
    _reject(_find_unsupported_engines(os.environ))
    with accelerates_errors():
        shards = is_switched_on("ACCELERATE_USE_FSDP", os.environ)
        # accelerate's launcher asks for `cpu_ram_efficient_loading` by itself, which fails with the buffers of batch
        # norms (1.15); every process builds the same weights without it.
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False) if shards else None
        backend = TorchDynamoPlugin().backend
        accumulation_steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))
    _reject(_find_unsupported_training(mixed_precision, backend, accumulation_steps, plugin))
    return plugin


def reject_unsupported(accelerator: Accelerator) -> None:
    """Raise ConfigError for the first setting of `accelerator`, whoever made it, that is not supported."""
    state, kind = accelerator.state, accelerator.distributed_type
    if kind not in _TYPES:
        _reject([(f"distributed_type: {kind.value}", _OTHER_LAUNCH)])
    if state.parallelism_config is not None:
        _reject([("parallelism_config", _OTHER_LAUNCH)])
    plugin = state.fsdp_plugin if kind == DistributedType.FSDP else None
    accumulation_steps = accelerator.gradient_accumulation_steps
    backend = state.dynamo_plugin.backend
    _reject(_find_unsupported_training(accelerator.mixed_precision, backend, accumulation_steps, plugin))
    for name, default in {"split_batches": False, "dispatch_batches": None, "even_batches": True}.items():
        if (value := getattr(accelerator, name)) != default:
            instead = "leave it out: the batch plan gives each process its part of every batch"
            _reject([(f"{name}={value}", instead)])


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


def _reject(found: Iterable[Unsupported]) -> None:
    for setting, instead in found:
        raise ConfigError("LAUNCH", f"accelerate's {setting} is not supported: {instead}")


def _find_unsupported_engines(environ: Mapping[str, str]) -> Iterator[Unsupported]:
    """Yield what accelerate would only meet as a missing library; engines that it does not have yet, too."""
    supported = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP")
    for name in environ:
        if name.startswith("ACCELERATE_USE_") and name not in supported and is_switched_on(name, environ):
            yield _ENGINES.get(name, name), _OTHER_LAUNCH
    if is_switched_on("ACCELERATE_USE_FSDP", environ) and (version := environ.get("FSDP_VERSION", "1")) != "2":
        yield f"fsdp_version: {version}", _FSDP_2
    if "ACCELERATE_FP8_BACKEND" in environ:
        yield "fp8_config", "leave it out and set mixed_precision to bf16"


def _find_unsupported_training(
    mixed_precision: str,
    backend: DynamoBackend,
    accumulation_steps: int,
    plugin: FullyShardedDataParallelPlugin | None,
) -> Iterator[Unsupported]:
    if mixed_precision not in _PRECISIONS:
        yield f"mixed_precision: {mixed_precision}", "set it to no, bf16 or fp16"
    if backend != DynamoBackend.NO:
        yield f"dynamo_backend: {backend.value}", "set it to 'no' and use --compile"
    if accumulation_steps != 1:
        yield f"gradient_accumulation_steps: {accumulation_steps}", "set it to 1 and use --accumulate"
    if plugin is not None:
        yield from _find_unsupported_sharding(plugin)


def _find_unsupported_sharding(plugin: FullyShardedDataParallelPlugin) -> Iterator[Unsupported]:
    """Yield what would fail, or would quietly train another model (accelerate 1.15, torch 2.13)."""
    from torch.distributed.fsdp import CPUOffloadPolicy  # 0.5 s of a start that does not shard

    if plugin.fsdp_version != 2:
        yield f"fsdp_version: {plugin.fsdp_version}", _FSDP_2
    if plugin.activation_checkpointing:
        yield (
            "fsdp_activation_checkpointing",
            "set it to false, since the second forward draws another dropout and updates batch norms again: call "
            "torch.utils.checkpoint in the model's forward",
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield "fsdp_offload_params", "set it to false and shard over more processes"
    if plugin.ignored_modules:
        yield "fsdp_ignored_modules", "leave it out: their gradients would not be averaged over the processes"
