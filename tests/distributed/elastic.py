"""A small run, one of whose processes kills itself, or its machine, at given places, attempt after attempt.

torchrun --nproc_per_node 2 --max_restarts 5 -m tests.distributed.elastic FOLDER --kill step-2 start step-4
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from accel_trainer import BatchConfig, Callback, RecipeConfig, main, process_group
from tests import workload


class KillAfterStep(Callback):
    """Kills its process after a step, or with it all that its launcher started, as if the machine were gone."""

    def __init__(self, step: int, *, with_launcher: bool = False) -> None:
        self._step, self._with_launcher = step, with_launcher

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == self._step:
            if self._with_launcher:
                kill_siblings()
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_siblings() -> None:
    launcher = psutil.Process(os.getppid())
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid != os.getpid():
            process.kill()


def command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--kill", nargs="*", default=[], help="one place per attempt: start, step-N, machine-N"
    )
    parser.add_argument("--rank", type=int, help="whose; default: the last")
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    victim = int(os.environ.get("WORLD_SIZE", 1)) - 1 if options.rank is None else options.rank
    is_victim = int(os.environ.get("RANK", 0)) == victim
    place = options.kill[attempt] if is_victim and attempt < len(options.kill) else ""
    if place == "start":
        process_group.rendezvous = lambda *args, **keywords: kill()  # type: ignore[assignment]
    what, _, step = place.partition("-")
    callbacks = (KillAfterStep(int(step), with_launcher=what == "machine"),) if step else ()
    batch = BatchConfig(per_device_batch_size=options.batch_size, eval_batch_size=10)
    config = workload.make_config(options.folder, batch=batch)
    main(lambda _: workload.train(config, callbacks=callbacks), RecipeConfig, description="", argv=[])


if __name__ == "__main__":
    command_line()
