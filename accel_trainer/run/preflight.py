"""Checks before any work: what would fail, or silently not be what the user meant.

These are cheap and run at every start; `accel-trainer doctor` has more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from ..core.errors import ConfigError, UserError
from ..distributed.accelerate_settings import is_switched_on
from ..distributed.determinism import is_too_late_for_cublas

if TYPE_CHECKING:
    from .config import RecipeConfig

_logger = logging.getLogger(__name__)

TRIED_TORCH = ("2.13", "2.15")  # `make test-torch`; the table is in docs/troubleshooting.md
_HAS_TF32 = (8, 0)
_LARGE_BATCH = 4  # times the batch that a learning rate was tuned at


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What the checks look at: a config, and facts of the machine as plain values, for tests."""

    config: RecipeConfig
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    num_gpus: int = field(default_factory=torch.cuda.device_count)
    has_mps: bool = field(default_factory=lambda: torch.backends.mps.is_available())
    has_nccl: bool = field(default_factory=dist.is_nccl_available)
    torch_version: str = torch.__version__
    is_too_late_for_cublas: bool = field(default_factory=is_too_late_for_cublas)
    gpu_capability: Callable[[], tuple[int, int]] = torch.cuda.get_device_capability

    @property
    def num_processes(self) -> int:
        """Processes of the launch, on all machines."""
        return int(self.environ.get("WORLD_SIZE", 1))

    @property
    def num_local_processes(self) -> int:
        """Processes of the launch on this machine."""
        return int(self.environ.get("LOCAL_WORLD_SIZE", 1))

    @property
    def is_on_cpu(self) -> bool:
        """Whether the launcher asked for the CPU, also where there is a GPU."""
        return is_switched_on("ACCELERATE_USE_CPU", self.environ)


@dataclass(frozen=True)
class Check:
    """`run` returns or raises what is wrong, its value and its fix in one line; its docstring is what should hold."""

    code: str
    severity: Literal["error", "warning"]
    run: Callable[[LaunchContext], str | None]

    def find(self, now: LaunchContext) -> str | None:
        """Return what is wrong, or None."""
        try:
            return self.run(now)
        except (UserError, OSError) as error:
            return str(error.args[-1])


def check_mps_processes(now: LaunchContext) -> str | None:
    """The GPU of a Mac has one process."""
    if not now.has_mps or now.is_on_cpu or now.num_processes == 1:
        return None
    return f"{now.num_processes} processes cannot share the GPU of a Mac: launch one with `python`, or use the CPU"


def check_nccl(now: LaunchContext) -> str | None:
    """Several GPUs have NCCL to speak through."""
    is_wanted = now.config.runtime.backend in (None, "nccl") and not now.is_on_cpu
    if now.has_nccl or not is_wanted or not now.num_gpus or now.num_processes == 1:
        return None
    fact = f"{now.num_processes} processes on GPUs, and this torch {torch.__version__} has no NCCL"
    return f"{fact}: install torch for CUDA on Linux, or use --runtime.backend gloo"


def check_idle_gpus(now: LaunchContext) -> str | None:
    """Every GPU of this machine has a process."""
    if now.num_gpus <= now.num_local_processes or now.is_on_cpu:
        return None
    fix = f"`accelerate launch --multi_gpu --num_processes {now.num_gpus} RECIPE`, or hide them (CUDA_VISIBLE_DEVICES)"
    return f"{now.num_gpus} GPUs are visible but {now.num_local_processes} is used, since each needs a process: {fix}"


def check_learning_rate(now: LaunchContext) -> str | None:
    """A batch that grew with the processes has its learning rate scaled and warmed up."""
    optimizer, schedule = now.config.optimizer.with_learning_rate(), now.config.schedule
    batch, base = now.config.batch.resolved_global_batch_size(now.num_processes), optimizer.base_batch_size
    large = f"the global batch {batch} is {batch / base:.3g} times --optimizer.base-batch-size {base}"
    if now.num_processes == 1 or batch < _LARGE_BATCH * base:
        return None
    if optimizer.learning_rate_scaling == "none":
        rule = f"--optimizer.learning-rate-scaling {'linear' if optimizer.name == 'sgd' else 'sqrt'}"
        fix = f"set {rule}, or --optimizer.base-batch-size {batch} if it was tuned for this batch"
        return f"{large} and --lr {optimizer.learning_rate:g} is not scaled: {fix}"
    if schedule.warmup_epochs == 0 and schedule.shape != "triangular":
        return f"{large} and the learning rate starts at its peak: set --schedule.warmup-epochs, such as 5"
    return None


def check_torch(now: LaunchContext) -> str | None:
    """The tests have run with this version of torch."""
    if now.torch_version.startswith(tuple(f"{tried}." for tried in TRIED_TORCH)):
        return None
    return f"torch {now.torch_version} has not been tried: the tests ran with {', '.join(TRIED_TORCH)}"


def check_cublas(now: LaunchContext) -> str | None:
    """Deterministic kernels of cuBLAS were requested before CUDA was used."""
    if not now.is_too_late_for_cublas or not now.config.runtime.deterministic or now.is_on_cpu:
        return None
    fix = "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, or use no GPU before the run"
    return f"CUDA was in use before the run, so matrix products may differ in their last bits: {fix}"


def check_tf32(now: LaunchContext) -> str | None:
    """A GPU with tensor cores uses them."""
    runtime = now.config.runtime
    precision = runtime.mixed_precision or now.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" or runtime.tf32 or now.is_on_cpu or not now.num_gpus or now.gpu_capability() < _HAS_TF32:
        return None
    return "float32 without TF32 does not use this GPU's tensor cores: add --mixed-precision bf16, or --runtime.tf32"


CHECKS = (
    Check("TORCH_UNTRIED", "warning", check_torch),
    Check("CUBLAS_LATE", "warning", check_cublas),
    Check("TENSOR_CORES", "warning", check_tf32),
    Check("MPS_PROCESSES", "error", check_mps_processes),
    Check("NCCL_MISSING", "error", check_nccl),
    Check("IDLE_GPUS", "warning", check_idle_gpus),
    Check("LEARNING_RATE", "warning", check_learning_rate),
)


def refuse_errors(now: LaunchContext) -> None:
    """Raise ConfigError for what cannot work, before the process group starts, which would hang or fail."""
    for check in CHECKS:
        if check.severity == "error" and (message := check.find(now)):
            raise ConfigError(check.code, message)


def log_warnings(now: LaunchContext) -> None:
    """Warn about what is probably not meant."""
    for check in CHECKS:
        if check.severity == "warning" and (message := check.find(now)):
            _logger.warning("[%s] %s", check.code, message)
