"""A callback that writes the learning rates of all steps of a run into `rates.json`."""

from __future__ import annotations

import json

from accel_trainer import Callback, TrainerConfig, TrainerView
from accel_trainer.commands import filesystem, read_run


class Rates(Callback):
    """Writes them when the run starts, also those of steps that it will not train."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Write the file on the main process."""
        if trainer.accelerator.is_main_process:
            folder = trainer.log.folder
            stored = read_run(folder).config["trainer"]
            length = TrainerConfig(num_epochs=stored["num_epochs"], num_steps=stored["num_steps"])
            num_steps = length.total_steps(trainer.loader.plan.steps_per_epoch)
            rates = [trainer.learning_rate_at(step) for step in range(num_steps)]
            filesystem.write_file_atomic(folder / "rates.json", json.dumps(rates).encode())
