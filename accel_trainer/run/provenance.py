"""What the config of a run does not show: packages, hardware, code, and the recipe's defaults."""

from __future__ import annotations

import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..checks.own_sources import own_sources
from ..core.config import config_to_dict, unchecked_defaults
from ..core.filesystem import sha256_of
from ..distributed.machine import available_cpus
from .config import RecipeConfig

_PACKAGES = ("accel-trainer", "accelerate", "datasets", "numpy", "safetensors", "torch")
# Matches the values of flags such as `--hub-token`.
_SECRET_FLAG = re.compile(
    r"(?i)(--[^\0=]*(?<![a-z])(?:token|secret|password|api-?key)(?![a-z])[^\0=]*[\0=])(?!-)[^\0]*"
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/\0\s@]+(?=@)")
# Matches keys of the hub, GitHub, GitLab, OpenAI, AWS, Slack and newer ones of Weights & Biases by
# their prefixes, and any long hexadecimal number.
_LIKE_SECRET = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|xox[abprs]-|wandb_v1_)[\w-]{8,}|\b[0-9a-f]{40,}\b"
)
# Variables that hold no secret: settings of communication and of how `accelerate launch` shards.
_VARIABLES = re.compile(
    "ACCEL_TRAINER_CALLBACKS|GLOO_SOCKET_IFNAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|SLURM_JOB_ID"
    "|TORCHELASTIC_(RESTART_COUNT|RUN_ID)"
    "|ACCELERATE_USE_(CPU|FSDP)|TORCH_(CPP_LOG_LEVEL|DISTRIBUTED_DEBUG)"
    "|FSDP_(AUTO_WRAP_POLICY|MIN_NUM_PARAMS|RESHARD_AFTER_FORWARD|STATE_DICT_TYPE"
    "|TRANSFORMER_CLS_TO_WRAP|VERSION)"
    r"|NCCL_(?!\w*(?:KEY|PASSWORD|SECRET|TOKEN))\w+"
)


def describe_environment(
    accelerator: Accelerator, recipe_defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is needed to compare or repeat runs, as JSON values."""
    device = accelerator.device
    arguments = _SECRET_FLAG.sub(r"\1***", "\0".join(sys.argv))
    return {
        "id": secrets.token_hex(16),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: found.version
            for name in _PACKAGES
            for found in [*metadata.distributions(name=name)][:1]
        },
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
            "num_cpus": available_cpus(),
            "num_threads": torch.get_num_threads(),
            "num_processes": accelerator.num_processes,
        },
        "mixed_precision": accelerator.mixed_precision,
        "backend": dist.get_backend() if accelerator.num_processes > 1 else None,
        "variables": {
            name: _mask(os.environ[name])
            for name in sorted(os.environ)
            if _VARIABLES.fullmatch(name)
        },
        "command": {"arguments": _mask(arguments).split("\0"), "directory": str(Path.cwd())},
        "code": _code(),
        "sources": own_sources(),
        "recipe_defaults": dict(recipe_defaults),
    }


def defaults_of(config_class: type[RecipeConfig]) -> dict[str, Any]:
    """Return the defaults of a recipe, with the length of a run as its config stores it."""
    defaults = unchecked_defaults(config_class)
    return {**config_to_dict(defaults), "trainer": asdict(defaults.trainer.with_defaults())}


def _mask(text: str) -> str:
    return _LIKE_SECRET.sub("***", _LOGIN_IN_URL.sub("***", text))


def _code() -> dict[str, Any]:
    """Return the recipe's path and hash, and the commit of its repository; None if there is none.

    Whether files differ from the commit is not recorded: git's comparison runs the programs that a
    repository's configuration names for it.
    """
    recipe = Path(sys.argv[0]).resolve()
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(recipe.parent), "rev-parse", "HEAD"]
        commit = (
            subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10).decode().strip()
        )
    return {
        "recipe": str(recipe),
        "sha256": sha256_of(recipe) if recipe.is_file() else None,
        "git_commit": commit,
    }
