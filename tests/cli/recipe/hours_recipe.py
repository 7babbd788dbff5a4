"""A recipe of tiny steps, whose `--hours` begin once Python is loaded, however long that takes."""

from __future__ import annotations

import time

from accel_trainer import RecipeConfig, main
from accel_trainer.cli.recipe import hours
from tests.lab.replay.poisoned import train

if __name__ == "__main__":
    hours.process_start_s = time.monotonic
    main(train, RecipeConfig)
