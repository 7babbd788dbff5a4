"""The samples of one step, from a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.filesystem import read_file
from ...core.json_files import parse_json
from . import step_samples
from .proof import Proof, prove
from .replay import STOP, Replay, errors_of_failures

Sample = Mapping[str, Any]

_STEP_SAMPLES = Path(step_samples.__file__)
_MAX_BYTES = 2**31


def samples_of(
    replay: Replay, step: int, folder: Path, *, until: int
) -> tuple[list[Sample], Proof]:
    """Train up to step `until` in the new `folder`, and return the samples of `step`.

    Those of the highest loss come first, and a loss that is NaN before them. A sample is what
    `step_samples.py` writes of it. The rows on the way are compared with those of the run.

    Raises:
        OutputError: the recipe failed.
    """
    with errors_of_failures() as errors:
        start = replay.train(
            folder,
            until=until,
            after=step - 1,
            callbacks=[_STEP_SAMPLES, STOP],
            variables={step_samples.STEP: str(step)},
            errors=errors,
        )
    samples = [
        sample
        for path in sorted(folder.glob("samples-*.json"))
        for sample in parse_json(read_file(path, max_bytes=_MAX_BYTES))
    ]
    proof = prove(replay.run.folder, folder, after=start, until=until)
    return sorted(samples, key=_by_loss), proof


def _by_loss(sample: Sample) -> tuple[float, int]:
    loss = math.nan if sample["loss"] is None else float(sample["loss"])
    return (-math.inf if math.isnan(loss) else -loss, sample["id"])
