"""A callback that ends a replay after its last step, without an evaluation."""

from __future__ import annotations

import signal

from accel_trainer import Callback, StepReport, TrainerView


class StopWithoutEvaluation(Callback):
    """Ends the run like a scheduler does: it saves the last step, and evaluates nothing."""

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Send the signal once `--max-steps` is reached."""
        if trainer.is_finished:
            signal.raise_signal(signal.SIGTERM)
