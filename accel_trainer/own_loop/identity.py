"""What a run of a user's own loop is: its settings, data and processes: a resume has the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from accelerate import Accelerator

from ..core.config import diff_config
from ..core.errors import CheckpointError, ConfigError
from ..data.fingerprint import is_same_data
from ..data.workers import SampleReader
from ..distributed.accelerator import library_versions
from ..distributed.collectives import run_on_main
from .loader import OrderedLoader

# A loop decides itself what it makes of these, so nothing is promised once one has changed.
_FIXED = ("num_processes", "batches", "accumulation", "mixed_precision")


def identify(
    accelerator: Accelerator, loader: OrderedLoader, settings: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return what the manifests of a run have of its start. **Collective.**"""
    dataset = loader.dataset

    def fingerprint() -> str:
        return SampleReader(dataset, torch.device("cpu"), seed=seed).fingerprint()

    return {
        "loop": "own",
        "settings": {"seed": seed, **settings},
        "num_processes": accelerator.num_processes,
        "batches": len(loader.batches),
        "accumulation": accelerator.gradient_accumulation_steps,
        "mixed_precision": accelerator.mixed_precision,
        "num_samples": [len(dataset)],
        "data_fingerprint": run_on_main(fingerprint, accelerator),
        "order": None,
        "num_threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


def check_same_run(
    stored: Mapping[str, Any], now: Mapping[str, Any], folder: object, allowed: Collection[str]
) -> None:
    """Raise ConfigError or CheckpointError if the run in `folder` is not that of this start."""
    if stored.get("loop") != "own":
        raise ConfigError("LOOP", f"{folder} holds the run of a recipe: choose a different folder")
    changes = diff_config(stored["settings"], now["settings"])
    refused = [each for each in changes if each[0] not in allowed]
    refused += [(name, stored[name], now[name]) for name in _FIXED if stored[name] != now[name]]
    if refused:
        shown = "; ".join(f"{name}: {old} -> {new}" for name, old, new in refused)
        names = tuple(name for name, *_ in refused if name not in _FIXED)
        fix = f", or continue on purpose with allow_change={names}" if names else ""
        raise ConfigError(
            "CONFIG_CHANGED",
            f"{folder} was made with different settings ({shown}): set them back, choose a "
            f"different folder{fix}",
        )
    is_same = stored["num_samples"] == now["num_samples"] and is_same_data(
        stored["data_fingerprint"], now["data_fingerprint"]
    )
    if not is_same and "data" not in allowed:
        raise CheckpointError(
            "DATA_CHANGED",
            f"the run in {folder} was trained on different data: restore it, choose a different "
            "folder, or continue on purpose with allow_change=('data',)",
        )
