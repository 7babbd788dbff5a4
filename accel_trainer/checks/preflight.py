"""Checks a launch before any work: will it fail, or silently not do what the user meant?

These are cheap and run at every start; `accel-trainer doctor` has more.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..core.batch_plan import BatchConfig
from ..core.errors import ConfigError
from ..distributed.accelerate_settings import is_switched_on
from ..distributed.accelerator import RuntimeConfig
from ..distributed.launch_env import count_local_processes, setup_launch_env
from ..optim.config import OptimizerConfig
from ..optim.lr_scheduler import ScheduleConfig
from ..training.config import TrainerConfig

_LARGE_BATCH = 4  # as a multiple of the batch size that the learning rate was tuned for


def refuse_launch(runtime: RuntimeConfig) -> None:
    """Raise ConfigError for a launch whose process group would hang or fail."""
    num_processes = setup_launch_env()
    if num_processes == 1 or is_switched_on("ACCELERATE_USE_CPU"):
        return
    if torch.backends.mps.is_available():
        raise ConfigError(
            "MPS_PROCESSES",
            f"{num_processes} processes cannot share the GPU of a Mac: launch one with `python`, "
            "or use the CPU",
        )
    needs_nccl = torch.cuda.device_count() > 0 and runtime.backend != "gloo"
    if needs_nccl and not dist.is_nccl_available():
        raise ConfigError(
            "NCCL_MISSING",
            f"{num_processes} processes on GPUs, and this torch {torch.__version__} has no NCCL: "
            "install torch for CUDA on Linux, or use --runtime.backend gloo",
        )


def find_launch_warnings(runtime: RuntimeConfig, *, is_too_late_for_cublas: bool) -> dict[str, str]:
    """Return warnings by their codes: each says what is probably not meant, and the fix."""
    num_gpus = 0 if is_switched_on("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    found = {}
    if num_gpus and runtime.deterministic and is_too_late_for_cublas:
        found["CUBLAS_LATE"] = (
            "CUDA was in use before the run, so matrix products may differ in their last bits: "
            "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, or use no GPU before the run"
        )
    num_used = count_local_processes()
    if num_gpus > num_used:
        found["IDLE_GPUS"] = (
            f"{num_gpus} GPUs are visible but {num_used} is used, since each needs a process: "
            f"`accelerate launch --multi_gpu --num_processes {num_gpus} RECIPE`, "
            "or hide them (CUDA_VISIBLE_DEVICES)"
        )
    return found


def find_setting_warnings(
    *,
    trainer: TrainerConfig,
    batch: BatchConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    has_weights: bool,
) -> dict[str, str]:
    """Return warnings of settings as above; `has_weights` if the run starts from given ones."""
    found = {}
    if not trainer.with_defaults().total_steps(1) and not has_weights:
        found["UNTRAINED"] = (
            "this run has no steps (--epochs 0), so it evaluates and exports the initial weights: "
            "train, or give weights with --init-from"
        )
    if message := _find_large_batch(batch, optimizer.with_defaults(), schedule):
        found["LEARNING_RATE"] = message
    return found


def _find_large_batch(
    batch: BatchConfig, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> str | None:
    """Return a warning if many processes make a large batch, and the learning rate ignores that.

    None if the learning rate is scaled and warmed up, or the batch is not large.
    """
    num_processes = setup_launch_env()
    size = batch.resolved_global_batch_size(num_processes)
    base = optimizer.base_batch_size
    if num_processes == 1 or size < _LARGE_BATCH * base:
        return None
    large = f"the global batch {size} is {size / base:.3g} times --optimizer.base-batch-size {base}"
    if optimizer.learning_rate_scaling == "none":
        scaling = "linear" if optimizer.name == "sgd" else "sqrt"
        return (
            f"{large} and --lr {optimizer.learning_rate:g} is not scaled: "
            f"set --optimizer.learning-rate-scaling {scaling}, "
            f"or --optimizer.base-batch-size {size} if it was tuned for this batch"
        )
    if not (schedule.warmup_epochs or schedule.warmup_steps or schedule.shape == "triangular"):
        return (
            f"{large} and the learning rate starts at its peak: "
            "set --schedule.warmup-epochs, such as 5"
        )
    return None
