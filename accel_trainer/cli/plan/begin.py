"""Trains a run whose length some hours have decided: once, before its first start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError
from ...run.config import RecipeConfig
from ..common.processes import forward_signals, start_recipe
from ..recipe.start import Start
from ..runs.run_reader import is_run, read_run


def length_begun(config: RecipeConfig) -> list[str]:
    """Return the flags of the length that the run has begun with; none if it has not begun.

    Raises:
        ConfigError: no output folder is set, in which the run would be found again.
        OutputError: the run is damaged.
    """
    folder = config.run.output_dir
    if folder is None:
        fact = "--start has no --output-dir, in which the same command finds the run again"
        raise ConfigError("PLAN", f"{fact}: add it")
    if not is_run(folder):
        return []
    settings = read_run(folder).settings
    lengths = {"--epochs": settings["trainer.num_epochs"], "--steps": settings["trainer.num_steps"]}
    return next([flag, str(count)] for flag, count in lengths.items() if count is not None)


def train(recipe: Path, flags: Sequence[str], *, num_processes: int) -> int:
    """Train as if the user had typed these flags, and return the exit code."""
    start = Start(recipe=str(recipe), flags=flags, num_processes=num_processes)
    with forward_signals(), start_recipe(start) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code
