"""Compares the outputs of two runs that should be equal, and finds why they are not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...checks.subject import first_difference
from ...core.errors import listed
from ...core.filesystem import sha256_of
from ...core.json_files import read_json_object
from ..runs.checkpoints import StoredCheckpoint, checkpoints_in
from ..runs.rows import read_rows

ROWS = "metrics.jsonl"


def difference_of_runs(one: Path, other: Path, *, left_out: Collection[str] = ()) -> str | None:
    """Return the path to the first difference of two finished runs; None if they are the same.

    Compared are the newest checkpoints, the rows without what is `left_out`, and the exported
    weights.
    """
    states = [state_of(checkpoints_in(run)[-1]) for run in (one, other)]
    if path := first_difference(*states):
        return path
    if path := first_difference(*(read_rows(run, left_out=left_out) for run in (one, other))):
        return f"{ROWS}{path}"
    return first_difference(_exports_of(one), _exports_of(other))


def state_of(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return what a checkpoint holds, without the state of callbacks, which may hold times."""
    pieces = {**checkpoint.read().pieces}
    del pieces["trainer"]["callbacks"]
    return pieces


def _exports_of(run: Path) -> dict[str, str]:
    """Return the hash of each file of exported weights, by its path without a dot."""
    files = sorted((run / "export").glob("*.safetensors"))
    return {f"export/{path.name}": sha256_of(path) for path in files}


def lost_state(one: Path, other: Path) -> list[str] | None:
    """Return the names of what differs between two runs before their next update.

    `one` and `other` are files of the same step that `unsaved.py` has written. None: a run ended
    before that step.
    """
    if not (one.is_file() and other.is_file()):
        return None
    left, found = map(read_json_object, (one, other))
    # What a checkpoint stores differs after a step that went another way, not only after a load.
    kinds = ("unsaved", "stored") if found["is_start"] else ("unsaved",)
    return sorted(
        name
        for kind in kinds
        for name, digest in left[kind].items()
        if digest != found[kind].get(name)
    )


def cause_of(path: str, lost: list[str] | None) -> str:
    """Return whether a resume began with what it had left, and the cause of what differs.

    `lost` is what `lost_state` returned.
    """
    if lost:
        fix = (
            "keep it in a buffer of the model, or in the state_dict of the optimizer or of a "
            "callback; compute a learning rate from the step; draw with torch's generator"
        )
        return f"the checkpoint did not bring back {listed(lost)}: {fix}"
    if path.startswith(ROWS):
        return (
            "the usual cause is an evaluation that draws random numbers, "
            "or depends on an earlier one"
        )
    hidden = "state that no checkpoint holds, such as a variable of a closure"
    if lost is None:
        return f"the usual cause is {hidden}"
    fact = "all known state was the same before the first update after the resume"
    return (
        f"{fact}, and then the steps went apart (the kernels): the usual causes are an operation "
        f"without a deterministic kernel, a clock, and {hidden}"
    )
