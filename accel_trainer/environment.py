"""What a run ran with and cannot be seen in its config: packages, hardware, and the commit of its recipe."""

from __future__ import annotations

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

_PACKAGES = ("accel-trainer", "accelerate", "datasets", "numpy", "safetensors", "torch")
_GIT_TIMEOUT_S = 10
_SECRET = re.compile(
    r"(?i)(--[^\0=]*(?<![a-z])(?:token|secret|password|api-?key)(?![a-z])[^\0=]*[\0=])(?!-)[^\0]*"
)
# What tunes the messages between processes, or says where they meet.
_VARIABLES = ("GLOO_", "MASTER_", "NCCL_", "OMP_", "SLURM_JOB_ID", "TORCHELASTIC_", "TORCH_")


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
            "num_cpus": available_cpus(),
            "num_threads": torch.get_num_threads(),
            "num_processes": accelerator.num_processes,
        },
        "mixed_precision": accelerator.mixed_precision,
        "backend": dist.get_backend() if accelerator.num_processes > 1 else None,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "command": {"arguments": _without_secrets(sys.argv), "directory": str(Path.cwd())},
        "code": _code(Path(sys.argv[0]).resolve()),
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    """Return a command with the values of flags such as `--hub-token` taken out."""
    return _SECRET.sub(r"\1***", "\0".join(arguments)).split("\0")


def available_cpus() -> int:
    """Return the cores that this process may run on: a scheduler or `taskset` often leaves it some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _code(recipe: Path) -> dict[str, Any]:
    """Return the recipe's name and the git commit it is from, if it is from one, with what was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(recipe.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"recipe": recipe.name, "git_commit": git("rev-parse", "HEAD"), "is_changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"recipe": recipe.name, "git_commit": None, "is_changed": None}
