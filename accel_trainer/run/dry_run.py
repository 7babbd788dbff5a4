"""What `--dry-run` changes in a run: fewer samples in an evaluation, and a record of what no checkpoint holds."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from ..core import filesystem
from ..core.callback import Callback, TrainerView
from ..core.types import Batch, EvalLoader, StepReport
from ..training.unseen_state import mark_unseen

NUM_STEPS = 3  # before the resume, and again after it
MAX_EVAL_SAMPLES = 512
UNSEEN_FILE = "unseen.json"
GENERATORS: dict[str, Callable[[], Any]] = {
    "Python's random": random.getstate,
    "numpy.random": np.random.get_state,
}


class FewSamples:
    """The first `num_own` samples of each process, with ids from 0 on."""

    def __init__(self, loader: EvalLoader, num_own: int, accelerator: Accelerator) -> None:
        self.num_samples = num_own * accelerator.num_processes
        self._loader, self._num_own, self._first = (
            loader,
            num_own,
            num_own * accelerator.process_index,
        )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples."""
        ids = range(self._first, self._first + self._num_own)
        for batch in self._loader.batches():
            mine, ids = ids[: len(batch)], ids[len(batch) :]
            first = batch.map(lambda tensor, own=mine: tensor[: len(own)])  # type: ignore[misc]  # a default
            yield replace(first, sample_ids=first.sample_ids.new_tensor(mine))
            if not ids:
                return


def limit_evaluation(
    loader: EvalLoader, *, num_parts: int | None, accelerator: Accelerator
) -> EvalLoader:
    """Return a loader of fewer samples, if one of this package has more than a dry run needs."""
    is_ours = type(loader).__module__.startswith(f"{__name__.partition('.')[0]}.")
    num_parts = num_parts or accelerator.num_processes
    if not is_ours or loader.num_samples <= MAX_EVAL_SAMPLES or num_parts > MAX_EVAL_SAMPLES:
        return loader
    num_equal = loader.num_samples // num_parts * num_parts  # of which each process has as many
    return FewSamples(
        loader, min(num_equal, MAX_EVAL_SAMPLES) // accelerator.num_processes, accelerator
    )


class UnseenRecorder(Callback):
    """Writes marks of what no checkpoint holds, where a dry run is interrupted and where it continues."""

    def __init__(self, folder: Path, parts: Mapping[str, object], *, model: nn.Module) -> None:
        self._folder, self._parts, self._model = folder, parts, model

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record what a resume begins with."""
        if trainer.state.optimizer_step:
            self._record(trainer)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Record what an interruption loses."""
        if report.optimizer_step == NUM_STEPS:
            self._record(trainer)

    def _record(self, trainer: TrainerView) -> None:
        if trainer.accelerator.is_main_process:
            marks = mark_unseen(self._parts, model=self._model)
            seen = {**marks, **{name: state() for name, state in GENERATORS.items()}}
            hashes = {
                name: hashlib.sha256(repr(mark).encode()).hexdigest() for name, mark in seen.items()
            }
            filesystem.write_file_atomic(self._folder / UNSEEN_FILE, json.dumps(hashes).encode())
