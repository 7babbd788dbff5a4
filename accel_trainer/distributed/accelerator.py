"""The accelerator: joins the processes of a launch, and sets precision, kernels and threads."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from typing import Annotated, Literal

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    patch_environment,
)
from accelerate.utils import FullyShardedDataParallelPlugin as FsdpPlugin

from ..core.config import POSITIVE, Config, Range, short_flag
from ..core.errors import ConfigError
from ..core.version import package_version
from ..core.wording import counted
from .accelerate_settings import (
    is_switched_on,
    launch_errors_explained,
    read_sharding,
    reject_unsupported,
    reset_accelerate,
)
from .determinism import allow_tf32, choose_kernels, prepare_cuda
from .launch_env import MAX_THREADS, count_local_processes, given_num_threads, setup_launch_env
from .machine import available_cpus
from .process_group import init_process_group

_THREADS = Range(f"to 1 to {MAX_THREADS}", lambda number: 1 <= number <= MAX_THREADS)
# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Config):
    """Precision, devices and processes."""

    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"] | None, short_flag("--mixed-precision")
    ] = None
    """Precision of the forward and backward passes; weights stay float32. None: the launcher's
    setting, else `no`."""
    sync_batch_norm: bool = True
    """With several processes, BatchNorm normalises over all of them, so their number does not
    change the model."""
    channels_last: bool = True
    """Lay out images and filters with channels innermost: usually faster on CPUs, and on GPUs in
    half precision."""
    compile: Annotated[bool | Literal["reduce-overhead"], short_flag("--compile")] = False
    """Compile the model with torch.compile; `reduce-overhead`: in that mode, for small networks on
    GPUs. Its other modes choose kernels by timing them, which a resume may not repeat."""
    deterministic: bool | Literal["strict"] = True
    """Use deterministic CUDA kernels; without them a resumed run is close, but not identical. An
    operation without one is a warning; `strict`: it ends the run."""
    num_threads: int | None = None
    """CPU threads per process, which affect the last bits; None: OMP_NUM_THREADS if set, else cores
    / processes; 1 with `--reduce exact`."""
    tf32: bool = False
    """Let CUDA compute float32 as TF32: faster, with 10 instead of 23 bits of mantissa."""
    loss_scale: float = 65536.0
    """The initial loss scale of fp16, which keeps small gradients from becoming 0; an overflow
    halves it, and 2000 steps without one double it."""
    timeout_s: float = 600.0
    """How long a process waits for the others in a collective before it fails."""
    stuck_timeout_s: float | None = None
    """End a process stuck for this long, and print its stack traces; None: `timeout_s`, or never
    for one process."""
    find_unused_parameters: bool = False
    """With several processes, allow parameters that a step does not use; costs a search of each
    step's graph."""
    backend: Literal["nccl", "gloo"] | None = None
    """The backend of torch.distributed; None: nccl between GPUs, gloo between CPUs."""

    def __post_init__(self) -> None:
        _THREADS.check(self, "runtime", "num_threads")
        POSITIVE.check(self, "runtime", "timeout_s", "stuck_timeout_s", "loss_scale")


def start_accelerator(config: RuntimeConfig) -> Accelerator:
    """Join the processes of this launch, and set precision and threads. **Collective.**

    Raises:
        ConfigError: the launcher's settings contradict each other, or are not supported.
        ProcessError: the other processes cannot be reached.
    """
    prepare_cuda()
    num_processes = setup_launch_env()
    if dist.is_initialized() and dist.get_world_size() != num_processes:
        raise ConfigError(
            "LAUNCH",
            f"init_process_group has joined {counted(dist.get_world_size(), 'process')}, but "
            f"WORLD_SIZE is {num_processes}: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT before that call, or start the processes with accel_trainer.launch",
        )
    use_cpu = uses_cpu()
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    sharding = read_sharding()
    if use_cpu and precision == "fp16":  # accelerate 1.15 would silently train in float32
        raise ConfigError(
            "CONFIG", "--mixed-precision fp16 needs a GPU, and there is none: use bf16 or no"
        )
    if config.backend == "nccl" and (use_cpu or not torch.cuda.is_available()):
        raise ConfigError(
            "CONFIG", "--runtime.backend nccl needs GPUs, and there are none: use gloo"
        )
    if num_processes > 1:
        _join(config, use_cpu=use_cpu)
    accelerator = _build_accelerator(
        config, precision, sharding, is_on_cpus=use_cpu and num_processes > 1
    )
    if accelerator.num_processes != num_processes:
        raise ConfigError(
            "LAUNCH",
            f"the launcher announced {num_processes} processes, accelerate found "
            f"{accelerator.num_processes}: for CPU processes launch with ACCELERATE_USE_CPU=true",
        )
    reject_unsupported(accelerator)
    torch.set_num_threads(
        config.num_threads
        or given_num_threads()
        or max(1, available_cpus() // count_local_processes())
    )
    allow_tf32(config.tf32)
    if accelerator.device.type == "cpu":
        _keep_freed_memory()
    if accelerator.device.type == "cuda":
        choose_kernels(config.deterministic)
    return accelerator


def uses_cpu() -> bool:
    """Return whether a run trains on the CPU: without a GPU, or if the launcher says so."""
    return is_switched_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def _build_accelerator(
    config: RuntimeConfig, precision: str, fsdp: FsdpPlugin | None, *, is_on_cpus: bool
) -> Accelerator:
    reset_accelerate()
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=config.find_unused_parameters),
        GradScalerKwargs(init_scale=config.loss_scale),
    ]
    if dist.is_initialized() and "cuda:gloo" in dist.get_backend_config():
        # accelerate 1.15 would take the group for one of NCCL.
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    # Without this variable accelerate sets the number of threads, with a warning. It is set later.
    with (
        launch_errors_explained(),
        patch_environment(omp_num_threads=os.environ.get("OMP_NUM_THREADS", "1")),
    ):
        accelerator = Accelerator(
            cpu=is_on_cpus,
            mixed_precision=precision,
            fsdp_plugin=fsdp,
            kwargs_handlers=handlers,
        )
    if is_on_cpus and fsdp is not None:
        # accelerate 1.15 shards only on accelerators: on CPUs it would silently use DDP.
        accelerator.state.fsdp_plugin = fsdp
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return accelerator


def _join(config: RuntimeConfig, *, use_cpu: bool) -> None:
    """Form the process group, which accelerate then uses."""
    if dist.is_initialized():
        if config.backend is not None and f":{config.backend}" not in dist.get_backend_config():
            raise ConfigError(
                "LAUNCH",
                f"--runtime.backend {config.backend}, but the processes already joined over "
                f"{dist.get_backend()}: create no process group or Accelerator before the run",
            )
        return
    backend: str = config.backend or "gloo"
    accelerator = None if use_cpu else torch.accelerator.current_accelerator()
    if accelerator is not None and config.backend in (None, "nccl"):
        # gloo beside nccl or its equivalent: the stop flag is reduced on the CPU, without a sync of
        # the accelerator.
        by_device = dist.get_default_backend_for_device(accelerator)
        backend = f"cpu:gloo,{accelerator.type}:{by_device}"
    device = None
    if "nccl" in backend:  # the GPU that accelerate chooses
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    init_process_group(backend, timeout_s=config.timeout_s, device=device)


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, unless the user has set malloc's options.

    Otherwise the system hands it out again page by page, which takes 16 % of the time of the CIFAR
    recipe on two cores.
    """
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that glibc accepts
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def describe_machine(accelerator: Accelerator) -> str:
    """Return the hardware and precision in one line."""
    device = accelerator.device
    name = counted(torch.get_num_threads(), "thread")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    backend = f" over {dist.get_backend()}" if accelerator.num_processes > 1 else ""
    where = f"{accelerator.num_processes} x {device.type} ({name}){backend}"
    precision = accelerator.mixed_precision.replace("no", "float32")
    return f"{where}, {precision}, torch {torch.__version__}"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that affect the bits of a result."""
    return {
        "accel_trainer": package_version(),
        "accelerate": accelerate.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
