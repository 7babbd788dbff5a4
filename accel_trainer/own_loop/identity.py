"""What a run of a user's own loop is: its settings, data and processes: a resume has the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..checkpoint.format import Manifest
from ..core.config import diff_config
from ..data.workers import SampleReader
from ..distributed.accelerator import library_versions
from ..distributed.collectives import run_on_main
from ..run.resume import Resume
from .loader import OrderedLoader

FIXED = ("num_processes", "batches", "accumulation", "mixed_precision")
"""A loop decides itself what it makes of these, so nothing is promised once one has changed."""


def identify(
    accelerator: Accelerator, loader: OrderedLoader, settings: Mapping[str, Any], seed: int
) -> Manifest:
    """Return what the manifests of a run have of its start. **Collective.**"""
    reader = SampleReader(loader.dataset, torch.device("cpu"), seed=seed)
    return {
        "loop": "own",
        "settings": {"seed": seed, **settings},
        "num_processes": accelerator.num_processes,
        "batches": len(loader.batches),
        "accumulation": accelerator.gradient_accumulation_steps,
        "mixed_precision": accelerator.mixed_precision,
        "num_samples": [len(reader)],
        "data_fingerprint": run_on_main(reader.fingerprint, accelerator),
        "order": None,
        "num_threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


def advise(run: str, names: Sequence[str]) -> str:
    """Return what the user of a loop can do about changes of these `names` since `run`."""
    named = tuple(name for name in names if name not in FIXED)
    if not named:
        return "or choose a different folder"
    return f"choose a different folder, or continue on purpose with allow_change={named}"


def check_same_run(resume: Resume, now: Manifest) -> None:
    """Raise ConfigError or CheckpointError if the run is not that of this start."""
    stored = resume.checkpoint.manifest
    fixed = [(name, stored[name], now[name]) for name in FIXED if stored[name] != now[name]]
    resume.compare_settings([*diff_config(stored["settings"], now["settings"]), *fixed])
    resume.compare(now)
