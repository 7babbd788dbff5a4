"""Kill a run of `--reduce exact` repeatedly and continue it on 4, 2, 1, 4, ... processes.

Is anything different?

    python -m tests.faults.elastic --number 40 --folder elastic

The same command continues. In the end it compares the run with one on a single process that nobody
touched, byte by byte: the export, every file of the newest checkpoint, and the rows without times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_trainer import BatchConfig, Callback, CheckpointConfig
from tests import processes, workload
from tests.training.test_exactness import final_files

PROCESSES = (4, 2, 1)
MAX_DELAY_S = 0.05
SURVIVOR_TIMEOUT_S = 60.0


class KillSoonAfter(Callback):
    """Kills its process a moment after the `number`-th step of this attempt."""

    def __init__(self, number: int, delay_s: float) -> None:
        self._left = number
        self._delay_s = delay_s

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self._left -= 1
        if self._left == 0:
            kill = threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()


def train(folder: Path, num_epochs: int, kill: tuple[int, int, float] | None) -> None:
    """Train, with a process to kill, after which step, and after which delay."""
    batch = BatchConfig(
        per_device_batch_size=2, global_batch_size=16, eval_batch_size=4, reduce="exact"
    )
    config = workload.make_config(folder, batch=batch, checkpoint=CheckpointConfig(every_n_steps=1))
    config = replace(config, trainer=replace(config.trainer, num_epochs=num_epochs))
    is_hit = kill is not None and kill[0] == int(os.environ.get("RANK", 0))
    callbacks = (KillSoonAfter(*kill[1:]),) if kill is not None and is_hit else ()
    workload.train(config, num_train=71, norm="batch", dropout=0.2, callbacks=callbacks)


def attempt(folder: Path, number: int, num_epochs: int) -> dict[str, Any]:
    """Start the run once and kill a process; return the exit codes."""
    draw = random.Random(number)
    num_processes = PROCESSES[number % len(PROCESSES)]
    kill = (draw.randrange(num_processes), draw.choice((2, 3)), draw.uniform(0, MAX_DELAY_S))
    logs = folder / f"logs-{number}"
    job = processes.start(
        train, folder / "run", num_epochs, kill, num_processes=num_processes, folder=logs
    )
    codes = job.wait(SURVIVOR_TIMEOUT_S)
    return {"number": number, "num_processes": num_processes, "kill": kill, "codes": codes}


def differences(folder: Path, num_epochs: int) -> list[str]:
    """Finish the run on one process, and return what differs from a run that nobody touched."""
    whole, run = folder / "whole", folder / "run"
    for path in (run, whole):
        processes.run(train, path, num_epochs, None, folder=folder / f"logs-{path.name}")
    mine, theirs = ({**final_files(path), "export": export(path)} for path in (run, whole))
    return sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))


def export(folder: Path) -> bytes:
    return (folder / "export" / "model.safetensors").read_bytes()


def campaign(folder: Path, number: int) -> bool:
    """Kill the run `number` times; return whether it ends with the same bytes."""
    folder.mkdir(exist_ok=True)
    # 5 steps each: more than the attempts take
    log = folder / "attempts.jsonl"
    num_epochs = 1 + number
    attempts = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for each in range(len(attempts), number):
        attempts.append(attempt(folder, each, num_epochs))
        with log.open("a") as file:
            file.write(json.dumps(attempts[-1]) + "\n")
    killed = sum(-signal.SIGKILL in each["codes"] for each in attempts)
    different = differences(folder, num_epochs)
    where = ", ".join(
        f"{sum(each['num_processes'] == n for each in attempts)} of {n} processes"
        for n in PROCESSES
    )
    print(
        f"{number} attempts ({where}), {killed} killed; "
        f"different from one process: {different or 'nothing'}"
    )
    return killed == number and not different


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    sys.exit(not campaign(options.folder, options.number))
