"""The samples of one step, from a replay."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_trainer.commands import filesystem

from . import step_samples
from .proof import Proof
from .replay import STOP, Replay

Sample = Mapping[str, Any]

_MAX_BYTES = 2**31


def samples_of(
    replay: Replay, step: int, folder: Path, *, until: int
) -> tuple[list[Sample], Proof]:
    """Train up to step `until` in the new `folder`, and return the samples of `step`.

    The highest losses come first, and NaN before them. A sample is what `step_samples.py` writes
    of it. The rows logged on the way are compared with the run's own.

    Raises:
        OutputError: the recipe failed.
    """
    trained = replay.train(
        folder,
        until=until,
        after=step - 1,
        callbacks={step_samples.__file__: {"step": step}, **STOP},
    )
    samples = [
        sample
        for path in sorted(folder.glob("samples-*.json"))
        for sample in json.loads(filesystem.read_file(path, max_bytes=_MAX_BYTES))
    ]
    return sorted(samples, key=_by_loss), trained.proof()


def _by_loss(sample: Sample) -> tuple[float, int]:
    loss = math.nan if sample["loss"] is None else float(sample["loss"])
    return (-math.inf if math.isnan(loss) else -loss, sample["id"])
