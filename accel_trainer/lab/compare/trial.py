"""Tries B for a step before anything is trained: whether it can branch off from a run of A."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from accel_trainer import ConfigError
from accel_trainer.commands import (
    Start,
    complete_by_step,
    scratch_folder,
)

from ..replay.replay import OWN_WEIGHTS, STOP
from ..silent import caught, train_silently
from .branches import ENDED
from .question import Question

_OF_THE_DATA = ("data_fingerprint", "num_samples", "global_batch_size")
_CODE = re.compile(r"^accel_trainer: error\[\w+\]: ")
_MOST_LETTERS = 160


def why_not_shared(question: Question, *, may_share: bool) -> str | None:
    """Return why B cannot continue from a checkpoint of A; None: it can, or need not.

    Raises:
        ConfigError: B has other samples in its steps.
        OutputError: A or B cannot be trained, and has said why.
    """
    with scratch_folder("compare") as folder:
        first, second = folder / "a", folder / "b"
        _require(question, question.a.flags, first)
        reason = None
        if names := question.acts_at_the_start:
            reason = f"{', '.join(names)} decides the initial weights"
        elif may_share:
            branch = ["--resume", str(first), "--allow-change", *question.may_change]
            flags = [*question.b.flags, *OWN_WEIGHTS, *branch]
            reason = _refusal(question, flags, second)
        if reason is not None or not may_share:
            second = folder / "b-alone"
            _require(question, question.b.flags, second)
        _check_same_data(first, second)
        return reason


def _require(question: Question, flags: Sequence[str], folder: Path) -> None:
    """Train the first step. Raises OutputError if the recipe fails."""
    command = " ".join([str(question.recipe), *flags])
    train_silently(_start(question, flags, folder, until=1), "COMPARE", command, may_end=ENDED)


def _refusal(question: Question, flags: Sequence[str], folder: Path) -> str | None:
    """Train up to step 2, and return the last line of a recipe that fails; None: it does not."""
    code, said = caught(_start(question, flags, folder, until=2))
    if code in ENDED:
        return None
    line = said.rpartition("\n")[2] or f"it ended with exit code {code}"
    return shorten(_CODE.sub("", line), _MOST_LETTERS, placeholder=" ...")


def _start(question: Question, flags: Sequence[str], folder: Path, *, until: int) -> Start:
    return Start(
        recipe=str(question.recipe),
        flags=[*flags, "--output-dir", str(folder), "--max-steps", str(until), "--quiet"],
        num_processes=question.num_processes,
        callbacks=STOP,
    )


def _check_same_data(first: Path, second: Path) -> None:
    one, other = (_manifest(folder) for folder in (first, second))
    for name in _OF_THE_DATA:
        if one and other and one.get(name) != other.get(name):
            fact = f"B has a different {name.replace('_', ' ')} than A, so seeds cannot be paired"
            raise ConfigError("COMPARE", f"{fact}: give the flags for the data to both, before --b")


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the header of the newest checkpoint; empty if it diverged before the first one."""
    found = complete_by_step(folder)
    return found[max(found)].read_manifest() if found else {}
