"""What `--dry-run` changes in a run: it evaluates fewer samples, and records unsaved state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..core.callback import Callback, TrainerView
from ..core.json_files import write_json
from ..core.types import Batch, EvalLoader, StepReport
from ..training.unsaved_state import mark_unsaved

NUM_STEPS = 3  # before the resume, and again after it
MAX_EVAL_SAMPLES = 512
UNSAVED_FILE = "unsaved.json"


class FewSamples:
    """The first `num_local` samples of each process, with new ids from 0 on."""

    def __init__(self, loader: EvalLoader, num_local: int, accelerator: Accelerator) -> None:
        self.num_samples = num_local * accelerator.num_processes
        self._loader = loader
        first = num_local * accelerator.process_index
        self._ids = range(first, first + num_local)

    def batches(self) -> Iterator[Batch]:
        """Yield this process's samples."""
        left = self._ids
        for batch in self._loader.batches():
            ids = left[: len(batch)]
            left = left[len(batch) :]
            cut = batch.map(itemgetter(slice(len(ids))))
            yield replace(cut, sample_ids=cut.sample_ids.new_tensor(ids))
            if not left:
                return


def limit_evaluation(loader: EvalLoader, accelerator: Accelerator) -> EvalLoader:
    """Return a loader of at most `MAX_EVAL_SAMPLES` samples, if `loader` is one of this package."""
    is_ours = type(loader).__module__.startswith(f"{__name__.partition('.')[0]}.")
    # No process has fewer: a loader of this package shares its samples out evenly.
    num_local = MAX_EVAL_SAMPLES // accelerator.num_processes
    if is_ours and num_local and loader.num_samples > MAX_EVAL_SAMPLES:
        return FewSamples(loader, num_local, accelerator)
    return loader


class UnsavedStateRecorder(Callback):
    """Writes hashes of state that no checkpoint holds, when a dry run ends and when it resumes."""

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self._folder = folder
        self._parts = parts

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the state that a resume begins with."""
        if trainer.state.optimizer_step:
            self._record(trainer)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Record the state that an interruption loses."""
        if report.optimizer_step == NUM_STEPS:
            self._record(trainer)

    def _record(self, trainer: TrainerView) -> None:
        if not trainer.accelerator.is_main_process:
            return
        marks = mark_unsaved(self._parts, model=self._parts["model"])
        hashes = {
            name: hashlib.sha256(repr(mark).encode()).hexdigest() for name, mark in marks.items()
        }
        write_json(self._folder / UNSAVED_FILE, hashes)
