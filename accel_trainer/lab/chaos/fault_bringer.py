"""A callback that delivers the fault of a start to the run or its disk."""

from __future__ import annotations

import os
import signal
import threading

from accel_trainer import Callback, StepReport, TrainerView
from accel_trainer.commands import filesystem
from accel_trainer.lab.chaos.disk import FaultyDisk

FAULT_BRINGER = __file__
"""This file, for the callbacks of a start with a fault."""


class FaultBringer(Callback):
    """Delivers the fault after its step."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Deliver a fault that comes before the first step."""
        self._deliver(trainer, 0)

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Deliver the fault if it is due."""
        self._deliver(trainer, report.optimizer_step)

    def _deliver(self, trainer: TrainerView, step: int) -> None:
        """Deliver a fault of the disk to every process, and any other to one of them."""
        disk = filesystem.disk
        assert isinstance(disk, FaultyDisk)
        fault = disk.fault
        if fault.step != step:
            return
        if fault.kind == "write":
            if step:  # else the disk counts since the start of the process
                disk.num_left = int(fault.value)
        elif fault.kind == "full":
            disk.is_full = True
        elif fault.step % trainer.accelerator.num_processes != trainer.accelerator.process_index:
            return
        elif fault.kind == "kill" and fault.value:
            kill = threading.Timer(fault.value, _send, (signal.SIGKILL,))
            kill.daemon = True
            kill.start()
        else:
            _send(signal.SIGKILL if fault.kind in ("kill", "damage") else signal.SIGTERM)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
