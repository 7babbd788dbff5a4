"""`result.json`: how a run ended, in numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ..checkpoint.serialization import read_json_object
from ..core import filesystem
from ..core.callback import Callback, RunResult, TrainerView
from ..core.run_dir import writes_to
from ..distributed.accelerator import peak_memory_bytes
from .metric_logger import MetricLogger

_MAX_RESULT_BYTES = 2**26


class ResultWriter(Callback):
    """Writes how the run ended, on the main process; an equal record keeps its times."""

    def __init__(self, run_folder: Path, *, log: MetricLogger, num_eval_samples: int) -> None:
        self._folder, self._log, self._num_eval_samples = run_folder, log, num_eval_samples
        self._start_s = time.perf_counter()

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Write it."""
        if not trainer.accelerator.is_main_process:
            return
        outcome = {
            "state": result.state, "stop_reason": result.stop_reason,
            "optimizer_step": result.position.optimizer_step, "epoch": result.position.epoch,
            "samples_seen": result.position.samples_seen, "metrics": dict(result.metrics),
            "best": None if result.best is None else vars(result.best), "num_eval_samples": self._num_eval_samples,
        }  # fmt: skip
        path = self._folder / "result.json"
        try:
            known = read_json_object(path, max_bytes=_MAX_RESULT_BYTES)
        except (OSError, ValueError):
            known = {}
        if json.loads(json.dumps(outcome)) == {name: known.get(name) for name in outcome}:
            return  # it has the times of the attempt that trained
        measured = {
            "images_per_s": self._log.samples_per_s,
            "wall_s": time.perf_counter() - self._start_s,
            "peak_memory_bytes": peak_memory_bytes(trainer.accelerator),
        }
        with writes_to(self._folder):
            filesystem.write_file_atomic(path, json.dumps({**outcome, **measured}, indent=1).encode())
