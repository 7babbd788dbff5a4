"""What decides the bits of a training besides its settings: versions, kernels and the device."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

import torch

from accel_trainer.commands import uses_cpu

PACKAGES = ("accel-trainer", "accelerate", "datasets", "numpy", "safetensors", "torch")


def versions_here(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those `packages` that are installed."""
    found = {
        name: package.version
        for name in packages
        for package in [*metadata.distributions(name=name)][:1]
    }
    return {**found, "python": platform.python_version()}


def kernels_here() -> str:
    """Return the instruction set that torch's CPU kernels use, such as AVX512."""
    return torch.backends.cpu.get_cpu_capability()


def device_here() -> str:
    """Return the device on which a run trains here by default, as a run records it."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment_here() -> dict[str, str]:
    """Return all that decides the bits of a new run here."""
    return {
        **versions_here(PACKAGES),
        "kernels for": kernels_here(),
        "device": "cpu" if uses_cpu() else device_here(),
    }
