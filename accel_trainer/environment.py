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
_MAX_DIFF_CHARACTERS = 1 << 20
_SECRET = re.compile(r"(?i)(--[^\0=]*(?<![a-z])(?:token|secret|password|api-?key)(?![a-z])[^\0=]*[\0=])(?!-)[^\0]*")
# What tunes the messages between processes, or says where they meet.
_VARIABLES = (
    "ACCELERATE_USE_", "FSDP_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "SLURM_JOB_ID", "TORCHELASTIC_", "TORCH_",
)  # fmt: skip


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
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "command": {"arguments": _without_secrets(sys.argv), "directory": str(Path.cwd())},
        "code": _code(),
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    """Return a command with the values of flags such as `--hub-token` taken out."""
    return _SECRET.sub(r"\1***", "\0".join(arguments)).split("\0")


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


def find_code_changes() -> str:
    """Return, as a diff, how the code differs from the commit that the recipe is from; of files that git tracks."""
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") or ""
    return diff[:_MAX_DIFF_CHARACTERS] + "\n(cut here)\n" * (len(diff) > _MAX_DIFF_CHARACTERS)


def _code() -> dict[str, Any]:
    """Return the recipe's path and hash, and the git commit it is from, if it is from one."""
    recipe = Path(sys.argv[0]).resolve()
    sha256 = hashlib.sha256(recipe.read_bytes()).hexdigest() if recipe.is_file() else None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {
        "recipe": str(recipe),
        "sha256": sha256,
        "git_commit": commit and commit.strip(),
        "is_changed": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """Return what git says in the recipe's folder; None if it has no commit there."""
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
