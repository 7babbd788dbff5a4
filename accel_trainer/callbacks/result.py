"""Records attempts in `attempts.jsonl`, the last end in `result.json`, and details beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import filesystem
from ..core.filesystem import writes_to
from ..core.json_files import read_json_object
from ..core.types import Results
from ..fault_tolerance.activity import Activity
from ..training.callback import Callback, RunResult, TrainerView
from .evaluation_file import EVALUATION_FILE, as_tensor_if_long, write_details
from .metric_logger import MetricLogger
from .metrics_file import MetricsFile, Row, without_nan

_MAX_RESULT_BYTES = 2**26


@dataclass(eq=False)
class ResultWriter(Callback):
    """Appends a row to `attempts.jsonl` at each start and orderly end, and writes `result.json`.

    For the main process. The details of an evaluation go to their file.

    A `start` row with no `end` row means that the attempt was killed. An `end` row has the seconds
    of each phase, `phase_s`. No checkpoint holds these rows, since what is trained does not depend
    on interruptions. If the outcome is that of the `result.json` in the folder, the file stays: it
    has the times of the attempt that trained.
    """

    folder: Path
    _: KW_ONLY
    log: MetricLogger
    num_eval_samples: int
    activity: Activity
    nondeterministic: AbstractSet[str]

    _is_attempt = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Record the start, unless there is nothing left to train."""
        self._is_attempt = not trainer.is_finished
        self._append("start", trainer, {"num_processes": trainer.accelerator.num_processes})

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Replace the details by those of this evaluation."""
        write_details(self.folder, metrics, optimizer_step=trainer.state.optimizer_step)

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Record how it ended."""
        self._append("end", trainer, {"state": result.state, "phase_s": self.activity.phase_s})
        more: dict[str, Any] = {"num_eval_samples": self.num_eval_samples}
        if self.nondeterministic:
            more["nondeterministic_operations"] = sorted(self.nondeterministic)
        measured = {
            "samples_per_s": self.log.samples_per_s,
            "wall_s": sum(self.activity.phase_s.values()),
            "peak_memory_bytes": self.log.peak_memory_bytes,
        }
        write_result(self.folder, result, more, measured)

    def _append(self, event: str, trainer: TrainerView, values: Row) -> None:
        if self._is_attempt:
            record_attempt(self.folder, event, trainer.state.optimizer_step, values)


def record_attempt(folder: Path, event: str, step: int, values: Row) -> None:
    """Append a row to `attempts.jsonl`."""
    row = {"event": event, "time": time.time(), "optimizer_step": step, **values}
    with closing(MetricsFile(folder / "attempts.jsonl")) as file:
        file.append(row)


def write_result(
    folder: Path, result: RunResult, more: Mapping[str, Any], measured: Mapping[str, Any]
) -> None:
    """Write `result.json`, unless it has this outcome: then it has the times of the training.

    `more` belongs to the outcome, `measured` does not. Raises OutputError.
    """
    outcome = {
        "state": result.state,
        "stop_reason": result.stop_reason,
        "optimizer_step": result.position.optimizer_step,
        "epoch": result.position.epoch,
        "samples_seen": result.position.samples_seen,
        "metrics": without_nan(_listed(result.metrics)),
        "best": result.best and vars(result.best),
        **more,
    }
    path = folder / "result.json"
    known = {}
    with suppress(OSError, ValueError):  # there is no result yet, or no whole one
        known = read_json_object(path, max_bytes=_MAX_RESULT_BYTES)
    if known != known | json.loads(json.dumps(outcome)):
        data = json.dumps({**outcome, **measured}, indent=1, allow_nan=False).encode()
        with writes_to(folder):
            filesystem.write_file_atomic(path, data)


def _listed(metrics: Results) -> Results:
    """Return metrics as JSON values; many numbers are replaced by their file and shape."""
    listed: dict[str, Any] = {}
    for name, value in metrics.items():
        compact = as_tensor_if_long(value)
        if isinstance(compact, Tensor):
            compact = {"file": EVALUATION_FILE, "shape": list(compact.shape)}
        listed[name] = compact
    return listed
