"""What a recipe prints around its run: other files in the folder, a loss that grew, what next."""

from __future__ import annotations

import math
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from ...callbacks.console import say
from ...core.history import is_number
from ...core.logger import logger
from ...core.run_dir import holds_run
from ...core.wording import counted
from ...training.callback import RunResult
from ...training.evaluation.evaluation import nonfinite_loss

_LOSS = "train/loss"
_MAX_GROWTH = 10
# Names of hidden files, and of what the output of programs goes to.
_OUTPUT = re.compile(r"^\.|^logs$|\.(log|out|err)$")


def note_other_items(folder: Path) -> None:
    """Print how many items a folder contains in which no run has begun."""
    with suppress(OSError):  # it does not exist yet, or the start reports what is wrong with it
        others = [name for name in os.listdir(folder) if not _OUTPUT.search(name)]
        if others and not holds_run(folder):
            say(
                f"note: {folder} is not empty and not a run: its {counted(len(others), 'item')} "
                f"will stay beside the run's files; {folder / 'run1'} would be a new folder"
            )


def warn_if_loss_grew(result: RunResult) -> None:
    """Warn if the training loss has ended far above where it began, and not as NaN or inf."""
    losses: list[float] = []
    if result.state != "preempted":
        with suppress(OSError, ValueError):  # the run has ended well, with or without its rows
            losses = [row[_LOSS] for row in result.history if is_number(row.get(_LOSS))]
    if losses and losses[0] > 0 and _MAX_GROWTH * losses[0] < losses[-1] < math.inf:
        logger.warning(
            "the training loss has ended at %.4g, more than %d times its first value of %.4g: set "
            "a lower --lr, or --optimizer.name adamw --lr 0.001; if the recipe creates its own "
            "optimizer, lower the learning rate there",
            losses[-1],
            _MAX_GROWTH,
            losses[0],
        )


def say_next(result: RunResult) -> None:
    """Print where the weights of a run are which has ended well, and the command that shows it."""
    if result.state != "preempted" and not nonfinite_loss(result.metrics):
        # Not wrapped, so that they can be copied.
        folder = result.folder
        with suppress(ValueError):
            folder = folder.relative_to(Path.cwd())
        if (weights := folder / "export" / "model.safetensors").is_file():
            say(f"weights: {weights}")
        say(f"next: accel-trainer report {shlex.quote(str(folder))} --open")
