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

if TYPE_CHECKING:
    from .config import RecipeConfig

_logger = logging.getLogger(__name__)

_LARGE_BATCH = 4  # times the batch that a learning rate was tuned at


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What the checks look at: a config, and facts of the machine as plain values, for tests."""

    config: RecipeConfig
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    num_gpus: int = field(default_factory=torch.cuda.device_count)
    has_mps: bool = field(default_factory=lambda: torch.backends.mps.is_available())
    has_nccl: bool = field(default_factory=dist.is_nccl_available)

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


CHECKS = (
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
