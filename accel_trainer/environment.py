"""What a run ran with and cannot be seen in its config: packages, hardware, the code, and who set which value."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from .config import config_to_dict, diff_config, parse_config_and_origins
from .errors import ConfigError
from .machine import available_cpus

_PACKAGES = ("accel-trainer", "accelerate", "datasets", "numpy", "safetensors", "torch")
_GIT_TIMEOUT_S = 10
_MAX_CHANGED_FILES = 100
_SECRET = re.compile(r"(?i)(--[^\0=]*(?<![a-z])(?:token|secret|password|api-?key)(?![a-z])[^\0=]*[\0=])(?!-)[^\0]*")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\0\s@]+(?=@)")
# As they begin at the hub, GitHub, GitLab, OpenAI, AWS, Slack and Weights & Biases' newer ones, or long and random.
_LIKE_SECRET = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|xox[abprs]-|wandb_v1_)[\w-]{8,}|\b[0-9a-f]{40,}\b"
)
# What tunes the messages between processes, says where they meet, or how `accelerate launch` was asked to shard.
_VARIABLES = {
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MPS_DEVICE", "ACCELERATE_USE_XPU",
    "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH",
    "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_FORWARD_PREFETCH", "FSDP_MIN_NUM_PARAMS", "FSDP_OFFLOAD_PARAMS",
    "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE", "FSDP_SYNC_MODULE_STATES",
    "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_USE_ORIG_PARAMS", "FSDP_VERSION",
    "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT",
    "NCCL_ALGO", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NTHREADS",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME", "NCCL_TIMEOUT",
    "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE", "SLURM_JOB_ID",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_SHOW_CPP_STACKTRACES",
}  # fmt: skip


def describe_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return what is needed to compare two runs or to repeat one, as JSON values."""
    device = accelerator.device
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
            "num_cpus": available_cpus(),
            "num_threads": torch.get_num_threads(),
            "num_processes": accelerator.num_processes,
        },
        "mixed_precision": accelerator.mixed_precision,
        "backend": dist.get_backend() if accelerator.num_processes > 1 else None,
        "variables": {name: _mask(os.environ[name]) for name in sorted(_VARIABLES & os.environ.keys())},
        "command": {"arguments": _without_secrets(sys.argv), "directory": str(Path.cwd())},
        "code": _code(),
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    """Return a command with the values of flags such as `--hub-token` taken out, and all that looks like a secret."""
    return _mask(_SECRET.sub(r"\1***", "\0".join(arguments))).split("\0")


def _mask(text: str) -> str:
    return _LIKE_SECRET.sub("***", _IN_ADDRESS.sub("***", text))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_origins(config: Any) -> dict[str, str]:
    """Return by dotted name where each value came from; `python` if it is not what the command line says."""
    try:
        parsed, origins = parse_config_and_origins(type(config), description="")
    except ConfigError:  # the command line of something else, such as a notebook's kernel
        parsed, origins = parse_config_and_origins(type(config), [], description="")
    found: dict[str, str] = {**origins}
    if "ACCELERATE_MIXED_PRECISION" in os.environ and config.runtime.mixed_precision is None:
        found["runtime.mixed_precision"] = "environment"
    changes = diff_config(config_to_dict(parsed), config_to_dict(config))
    return found | {name: "python" for name, _, _ in changes}


def _code() -> dict[str, Any]:
    """Return the recipe's path and hash, the git commit it is from, if it is from one, and which files are not.

    Of files that git tracks, by their names: their content may be a key that must not be written down.
    """
    recipe = Path(sys.argv[0]).resolve()
    sha256 = hashlib.sha256(recipe.read_bytes()).hexdigest() if recipe.is_file() else None
    commit, changes = _git("rev-parse", "HEAD"), _git("diff", "--name-only", "-z", "HEAD")
    return {
        "recipe": str(recipe),
        "sha256": sha256,
        "git_commit": commit and commit.strip(),
        "is_changed": None if changes is None else bool(changes),
        "changed_files": (changes or "").split("\0")[:-1][:_MAX_CHANGED_FILES],
    }


def _git(*arguments: str) -> str | None:
    """Return what git says in the recipe's folder; None if it has no commit there."""
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
