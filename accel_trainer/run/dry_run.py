"""A trial of a run: a step, an evaluation, a checkpoint, and the same again from the checkpoint."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState

from ..callbacks.console import say
from ..core.callback import RunResult
from .config import RecipeConfig

C = TypeVar("C", bound=RecipeConfig)


def dry_run(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train a step in a temporary folder, resume from its checkpoint for another, and print that it worked.

    Everything is done as in the run itself, with the evaluation of the whole test set. **Collective.**
    """
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        place = replace(config.run, output_dir=Path(folder), resume="auto", track=())
        for max_steps in (1, 2):
            trainer = replace(config.trainer, max_steps=max_steps)
            result = train(replace(config, run=place, trainer=trainer))
            if result.state != "done":
                return result
    if PartialState().is_main_process:
        seconds = time.perf_counter() - start_s
        say(f"dry run ok: trained, evaluated, saved, loaded and resumed in {seconds:.1f} s; no files are left")
    return result
