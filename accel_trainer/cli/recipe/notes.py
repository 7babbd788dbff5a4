"""What a recipe prints before and after its run: what else is in the folder, the next command."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from ...core.callback import RunResult
from ...core.console import say
from ...core.run_dir import holds_run
from ...core.wording import counted
from ...training.evaluation import nonfinite_loss

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


def say_next(result: RunResult) -> None:
    """Print the command that shows a run which has ended well."""
    if result.state != "preempted" and not nonfinite_loss(result.metrics):
        # Not wrapped, so that it can be copied.
        say(f"next: accel-trainer report {shlex.quote(str(result.folder))} --open")
