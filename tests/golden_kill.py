"""A callback that kills its run with SIGKILL after step 5, once: `GOLDEN_KILLED` names a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from accel_trainer import Callback, StepReport, Trainer


class KillOnce(Callback):
    """Kills the main process; a launcher ends the others."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        killed = Path(os.environ["GOLDEN_KILLED"])
        if report.optimizer_step != 5 or not trainer.accelerator.is_main_process or killed.exists():
            return
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
