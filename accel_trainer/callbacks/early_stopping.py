"""Reasons to stop before the last epoch."""

from __future__ import annotations

import time

from ..core.registry import StateDict
from ..core.types import Results, StepReport
from ..fault_tolerance.preemption import TIME_LIMIT, StopFlag
from ..training.callback import Callback, TrainerView


class EarlyStopping(Callback):
    """Stops when the monitored metric has not improved for `patience` evaluations in a row."""

    def __init__(self, *, patience: int) -> None:
        self.patience = patience
        self.num_bad_evaluations = 0
        self.best_checkpoint: str | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Decide again whether to stop: a run may continue with a different patience or metric."""
        self._count(0, trainer)

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Count the evaluations since the best one, and stop if there are too many."""
        self._count(1, trainer)

    def _count(self, num_evaluations: int, trainer: TrainerView) -> None:
        best = trainer.best.name if trainer.best else None
        self.num_bad_evaluations += num_evaluations
        if best != self.best_checkpoint:
            self.num_bad_evaluations = 0
        self.best_checkpoint = best
        if self.num_bad_evaluations >= self.patience:
            trainer.request_stop(f"early stopping: no better evaluation in {self.patience}")

    def state_dict(self) -> StateDict:
        """Return the counter, and the best checkpoint from which it counts."""
        return {
            "num_bad_evaluations": self.num_bad_evaluations,
            "best_checkpoint": self.best_checkpoint,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.num_bad_evaluations = state["num_bad_evaluations"]
        self.best_checkpoint = state["best_checkpoint"]


class TimeLimit(Callback):
    """Stops after `max_seconds` of this attempt; the same command continues the run."""

    def __init__(self, stop_flag: StopFlag, *, max_seconds: float) -> None:
        self._stop_flag = stop_flag
        self._deadline_s = time.monotonic() + max_seconds

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Request a stop once the time is over."""
        if time.monotonic() > self._deadline_s:
            self._stop_flag.request(TIME_LIMIT)
