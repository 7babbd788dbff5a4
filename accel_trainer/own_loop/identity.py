"""What a run of a user's own loop is: its settings, data and processes: a resume has the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..core.config import diff_config
from ..data.workers import SampleReader
from ..distributed.accelerator import library_versions
from ..distributed.collectives import run_on_main
from ..run.resume import Resume, Source, load_for_all
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


def load_resume(
    source: Source | None, allowed: Collection[str], accelerator: Accelerator, *, timeout_s: float
) -> Resume | None:
    """Return the resume of a loop; None if the run is new. **Collective.**

    Raises CheckpointError, or ConfigError for the run of a recipe.
    """

    def advise(run: str, names: Sequence[str]) -> str:
        named = tuple(name for name in names if name not in _FIXED)
        if not named:
            return "or choose a different folder"
        return f"choose a different folder, or continue on purpose with allow_change={named}"

    checkpoint = load_for_all(source, accelerator, timeout_s=timeout_s)
    if source is None or checkpoint is None:
        return None
    free = {*allowed} - {*_FIXED}
    resume = Resume(source, checkpoint, accelerator.is_main_process, free, advise)
    resume.refuse_other_loop("own")
    return resume


def check_same_run(resume: Resume, now: Mapping[str, Any]) -> None:
    """Raise ConfigError or CheckpointError if the run is not that of this start."""
    stored = resume.checkpoint.manifest
    fixed = [(name, stored[name], now[name]) for name in _FIXED if stored[name] != now[name]]
    resume.compare_settings([*diff_config(stored["settings"], now["settings"]), *fixed])
    resume.compare(now)
