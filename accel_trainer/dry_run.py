"""A run in small, to see that it would work: a step, an evaluation, a checkpoint, and all of that resumed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState

from .console import say
from .run_config import RecipeConfig
from .trainer import RunResult

C = TypeVar("C", bound=RecipeConfig)


def dry_run(train: Callable[[C], RunResult], config: C) -> RunResult:
    """Train a step in a folder that is gone afterwards, go on from its checkpoint for another, and say so.

    All is done as in the run itself, the evaluation of the whole test set included. **Collective.**
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
        say(f"dry run ok: trained, evaluated, saved, loaded and resumed in {seconds:.1f} s; nothing is left")
    return result
