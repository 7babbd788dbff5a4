"""The samples of one step, from a replay."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_trainer import ExitCode
from accel_trainer.commands import counted, filesystem, shortened

from . import step_samples
from .proof import Proof
from .replay import ENDED, STOP, Replay

Sample = Mapping[str, Any]

_MAX_BYTES = 2**31
_MAX_SHOWN = 8


def samples_of(
    replay: Replay, step: int, folder: Path, *, until: int
) -> tuple[list[Sample], Proof]:
    """Train up to step `until` in the new `folder`, and return the samples of `step`.

    The highest losses come first, and NaN before them. A sample is what `step_samples.py` writes
    of it; there are none if the run has no such step. The rows logged on the way are compared with
    the run's own. The state after the step may hold NaN, so that it cannot be saved.

    Raises:
        OutputError: the recipe failed.
    """
    trained = replay.train(
        folder,
        until=until,
        after=step - 1,
        callbacks={step_samples.__file__: {"step": step}, **STOP},
        may_end=(*ENDED, ExitCode.DIVERGED),
    )
    samples = [
        sample
        for path in sorted(folder.glob("samples-*.json"))
        for sample in json.loads(filesystem.read_file(path, max_bytes=_MAX_BYTES))
    ]
    return sorted(samples, key=_by_loss), trained.proof()


def tell_samples(samples: Sequence[Sample]) -> str:
    """Return the ids and losses of the first samples as text."""
    shown = [
        str(each["id"]) if each["loss"] is None else f"{each['id']} ({float(each['loss']):.4g})"
        for each in samples
    ]
    heading = f"its {counted(len(samples), 'sample')}, by loss"
    return f"{heading}: {shortened(shown, most=_MAX_SHOWN)}"


def _by_loss(sample: Sample) -> tuple[float, int]:
    loss = math.nan if sample["loss"] is None else float(sample["loss"])
    return (-math.inf if math.isnan(loss) else -loss, sample["id"])
