"""A run whose last process kills itself at given places, attempt after attempt, under a launcher that restarts it.

torchrun --nproc_per_node 2 --max_restarts 5 -m tests.distributed.elastic FOLDER --kill step-2 start step-4
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from accel_trainer import Callback, RecipeConfig, main, process_group
from tests import workload


class KillAfterStep(Callback):
    """Kills its process after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == self._step:
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", nargs="*", default=[], help="one place per attempt: start, or step-N")
    options = parser.parse_args()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    place = options.kill[attempt] if is_last and attempt < len(options.kill) else None
    if place == "start":
        process_group.rendezvous = lambda *args, **keywords: kill()  # type: ignore[assignment]
    callbacks = (KillAfterStep(int(place.removeprefix("step-"))),) if place and place != "start" else ()
    config = workload.make_config(options.folder)
    main(lambda _: workload.train(config, callbacks=callbacks), RecipeConfig, description="", argv=[])


if __name__ == "__main__":
    command_line()
