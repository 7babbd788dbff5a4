"""A small run whose last process of a machine kills itself, or the machine, at given places.

It does so attempt after attempt:


torchrun --nproc_per_node 2 --max_restarts 5 -m tests.distributed.elastic FOLDER --kill step-2 start
step-4
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ClassificationTask,
    RecipeConfig,
    StepOutput,
    main,
)
from accel_trainer.distributed import process_group
from tests import workload


class KillAfterStep(Callback):
    """Kills its process after a step, or its launcher's whole tree, as if the machine were gone."""

    def __init__(self, step: int, *, with_launcher: bool = False) -> None:
        self._step = step
        self._with_launcher = with_launcher

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == self._step:
            if self._with_launcher:
                kill_siblings()
            kill()


class PauseOnce(ClassificationTask, Callback):
    """Waits for the file `continue` in an epoch, in the first evaluation, or in a save.

    Evaluations are tried with one batch before the first step, which does not count.
    """

    def __init__(self, place: str, folder: Path) -> None:
        super().__init__()
        self._place = place
        self._folder = folder
        self._has_trained = False

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self._has_trained = True
        if report.optimizer_step == 2:
            self._pause("step")

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if self._has_trained:
            self._pause("evaluation")
        return super().eval_step(model, batch)

    def on_checkpoint(self, trainer: Any, name: str) -> None:
        self._pause("save")

    def _pause(self, place: str) -> None:
        if place == self._place:
            self._place = ""
            (self._folder / f"paused-{os.environ['RANK']}").touch()
            while not (self._folder / "continue").exists():
                time.sleep(0.05)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_siblings() -> None:
    launcher = psutil.Process(os.getppid())
    if "tests.distributed.elastic" not in launcher.cmdline():
        # It is gone, and this is its successor: kill nothing that this test did not start.
        return
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid != os.getpid():
            process.kill()


class Samples(ClassificationTask, Callback):
    """Writes down the samples of each step, as one line per process."""

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__()
        self._path = path
        self._attempt = attempt
        self._ids: list[int] = []

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self._ids += batch.sample_ids.tolist()
        return super().step(model, batch)

    def on_step_end(self, trainer: Any, report: Any) -> None:
        row = {"attempt": self._attempt, "step": report.optimizer_step, "samples": self._ids}
        self._ids = []
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--kill", nargs="*", default=[], help="one place per attempt: start, step-N, machine-N"
    )
    parser.add_argument("--samples", type=Path, help="where to write down who trained on what")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--pause", default="", help="where to wait for a file beside FOLDER: step, evaluation, save"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args()
    environ = os.environ
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_last = int(environ.get("LOCAL_RANK", 0)) == int(environ.get("LOCAL_WORLD_SIZE", 1)) - 1
    place = options.kill[attempt] if is_last and attempt < len(options.kill) else ""
    if place == "start":
        process_group.rendezvous = lambda *args, **keywords: kill()  # type: ignore[assignment]
    what, _, step = place.partition("-")
    task = None if options.samples is None else Samples(options.samples, attempt)
    if options.pause:
        task = PauseOnce(options.pause, options.folder.parent)
    callbacks = [] if task is None else [task]
    if step:
        callbacks.append(KillAfterStep(int(step), with_launcher=what == "machine"))
    batch = BatchConfig(per_device_batch_size=options.batch_size, eval_batch_size=10)
    config = workload.make_config(options.folder, batch=batch)
    config = replace(config, runtime=replace(config.runtime, timeout_s=options.timeout_s))
    main(
        lambda _: workload.train(
            config, task=task, callbacks=tuple(callbacks), dtype=torch.float64
        ),
        RecipeConfig,
        description="",
        argv=[],
    )


if __name__ == "__main__":
    command_line()
