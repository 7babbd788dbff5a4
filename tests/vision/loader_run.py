"""What the loaders of images and photos take from a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from accelerate import Accelerator

from accel_trainer import BatchConfig, RecipeConfig, Run


def loader_run(batch: BatchConfig, accelerator: Accelerator | None = None) -> Run:
    """Return the config and the accelerator (None: of one process on the CPU), without a folder."""
    config = RecipeConfig(batch=batch)
    run = SimpleNamespace(config=config, accelerator=accelerator or Accelerator(cpu=True))
    return cast(Run, run)
