"""A callback that pauses each attempt of a run after two steps, until it has a signal."""

from __future__ import annotations

import os
from pathlib import Path

from accel_trainer import Callback, StepReport, Trainer
from tests.faults.signals import note_signals, pause


class Pausing(Callback):
    """`PAUSED_IN` is the folder of `signals.pause`."""

    unsaved_attributes = ("num_left",)

    def __init__(self) -> None:
        self.num_left = 2
        self._folder = Path(os.environ["PAUSED_IN"])

    def on_fit_start(self, trainer: Trainer) -> None:
        note_signals(self._folder, trainer.accelerator.process_index)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            pause(self._folder, trainer.accelerator.process_index)
