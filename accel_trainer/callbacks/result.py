"""The records of a run's attempts: `attempts.jsonl` and `result.json`, which says in numbers how the last one ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.serialization import read_json_object
from ..core import filesystem
from ..core.callback import Callback, RunResult, TrainerView
from ..core.run_dir import writes_to
from ..distributed.machine import peak_memory_bytes
from ..training.evaluation_file import EVALUATION_FILE, as_tensor_if_long
from .metric_logger import MetricLogger
from .metrics_file import MetricsFile

_MAX_RESULT_BYTES = 2**26


class ResultWriter(Callback):
    """Appends a row to `attempts.jsonl` at each start and orderly end, and writes `result.json`.

    For the main process.

    A start without an end was killed. An end has the seconds of each phase, `phase_s`. No
    checkpoint holds these rows, since what is trained does not depend on interruptions. An equal
    `result.json` keeps its times.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        log: MetricLogger,
        num_eval_samples: int,
        phase_s: Mapping[str, float],
        nondeterministic: AbstractSet[str] = frozenset(),
    ) -> None:
        self._folder, self._log, self._num_eval_samples, self._phase_s = (
            run_folder,
            log,
            num_eval_samples,
            phase_s,
        )
        self._nondeterministic = nondeterministic
        self._start_s, self._is_attempt = time.perf_counter(), False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the start, unless there is nothing left to train."""
        self._is_attempt = not trainer.is_finished
        self._append("start", trainer, {"num_processes": trainer.accelerator.num_processes})

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Record how it ended."""
        self._append("end", trainer, {"state": result.state, "phase_s": dict(self._phase_s)})
        outcome = {
            "state": result.state,
            "stop_reason": result.stop_reason,
            "optimizer_step": result.position.optimizer_step,
            "epoch": result.position.epoch,
            "samples_seen": result.position.samples_seen,
            "metrics": _listed(result.metrics),
            "best": None if result.best is None else vars(result.best),
            "num_eval_samples": self._num_eval_samples,
        }
        if self._nondeterministic:
            outcome["nondeterministic_operations"] = sorted(self._nondeterministic)
        path, known = self._folder / "result.json", {}
        with suppress(OSError, ValueError):  # there is none, or not a whole one
            known = read_json_object(path, max_bytes=_MAX_RESULT_BYTES)
        if known == known | json.loads(json.dumps(outcome)):
            return  # it has the times of the attempt that trained
        measured = {
            "samples_per_s": self._log.samples_per_s,
            "wall_s": time.perf_counter() - self._start_s,
            "peak_memory_bytes": peak_memory_bytes(trainer.accelerator),
        }
        with writes_to(self._folder):
            filesystem.write_file_atomic(
                path, json.dumps({**outcome, **measured}, indent=1).encode()
            )

    def _append(self, event: str, trainer: TrainerView, values: Mapping[str, Any]) -> None:
        if self._is_attempt:
            row = {
                "event": event,
                "time": time.time(),
                "optimizer_step": trainer.state.optimizer_step,
            }
            with closing(MetricsFile(self._folder / "attempts.jsonl")) as file:
                file.append({**row, **values})


def _listed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics for JSON, with the file and the shape in place of many numbers."""
    compact = {name: as_tensor_if_long(value) for name, value in metrics.items()}
    return {
        name: {"file": EVALUATION_FILE, "shape": list(value.shape)}
        if isinstance(value, Tensor)
        else value
        for name, value in compact.items()
    }
