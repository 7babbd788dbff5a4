"""What a run sends beside its gradients, counted for 2, 4 and 8 processes: connections, bytes and
TCP segments."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TopKAccuracy,
    TrainerConfig,
    build_trainer,
    launch,
    start_run,
)

from . import results

PROCESSES = (2, 4, 8)
PREDICTED = (64, 1024)
NUM_STEPS = 50
PARTS = {"rendezvous": 0, "start": 1, "step": 3, "evaluation": 4}  # by the snapshot at its end


def traffic() -> tuple[int, int, int]:
    """Return the TCP connections of this process, and the bytes and segments that it has sent over
    them."""
    text = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if f"pid={os.getpid()}," in line]

    def total(name: str) -> int:
        return sum(int(number) for line in lines for number in re.findall(rf"\b{name}:(\d+)", line))

    return len(lines), total("bytes_sent"), total("segs_out")


class Snapshots(Callback):
    """Counts at the end of the start, after the first step, after the last step of the epoch, after
    the evaluation."""

    def __init__(self) -> None:
        self.rows = [traffic()]

    def on_fit_start(self, trainer: Any) -> None:
        self.rows.append(traffic())

    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step in (1, 1 + NUM_STEPS):
            self.rows.append(traffic())

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        self.rows.append(traffic())


def count(norm: bool) -> list[list[list[int]]]:
    """Train a model of 2,570 weights, with a batch norm or without; return what each process
    counted as JSON."""
    num_processes = int(os.environ["WORLD_SIZE"])
    samples = [
        (torch.randn(256), index % 10) for index in range(8 * num_processes * (1 + NUM_STEPS))
    ]
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=8, eval_batch_size=100),
        trainer=TrainerConfig(num_epochs=1),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=Path(os.environ["TRAFFIC_FOLDER"]), quiet=True),
    )
    with start_run(config, recipe="traffic") as run:
        snapshots = Snapshots()
        layers = [nn.BatchNorm1d(256), nn.Linear(256, 10)] if norm else [nn.Linear(256, 10)]
        trainer = build_trainer(
            run,
            model=nn.Sequential(*layers),
            task=ClassificationTask(),
            train_set=samples,
            eval_sets=samples[:1000],
            metrics=[MeanLoss(), TopKAccuracy()],
            callbacks=[snapshots],
        )
        trainer.fit()
        mine = torch.tensor(snapshots.rows)
        counts: list[list[list[int]]] = run.accelerator.gather(mine[None]).tolist()
        return counts


def measure(num_processes: int, norm: bool) -> list[list[list[int]]]:
    """Return by process the counts of each snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ACCELERATE_USE_CPU": "true", "TRAFFIC_FOLDER": str(Path(folder) / "run")}
        return launch(count, norm, num_processes=num_processes)


def table(rows: dict[int, Any], part: str, *, num_weights: int = 0) -> list[results.Row]:
    """Return what the main process and the busiest other one sent in a part of the run, and what
    more would send.

    Of a step, the bytes of `num_weights` gradients are left out: an all-reduce sends 2 (P - 1) / P
    of them.
    """
    place, divisor = PARTS[part], NUM_STEPS if part == "step" else 1

    def sent(counts: list[list[int]], column: int) -> float:
        before = counts[place - 1][column] if place else 0
        gradients = (
            4 * num_weights * 2 * (len(processes) - 1) / len(processes) if column == 1 else 0
        )
        return (counts[place][column] - before) / divisor - gradients

    lines = []
    for number, processes in rows.items():
        main, others = processes[0], processes[1:]
        lines.append(
            {
                "processes": number,
                "main: bytes": sent(main, 1),
                "main: segments": sent(main, 2),
                "another, at most: bytes": max(sent(each, 1) for each in others),
                "another, at most: segments": max(sent(each, 2) for each in others),
                "main: connections": main[place][0],
                "another: connections": max(each[place][0] for each in others),
            }
        )
    four, eight = lines[-2:]
    for number in PREDICTED:
        row = {name: eight[name] + (eight[name] - four[name]) / 4 * (number - 8) for name in four}
        lines.append({**row, "processes": f"{number}, if it grows so"})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="count once with these, and print it as JSON")
    parser.add_argument("--norm", action="store_true", help="with a batch norm over all processes")
    options = parser.parse_args()
    if options.processes:
        print(json.dumps(measure(options.processes, options.norm)))
        return
    started = results.environment()
    counted = {
        norm: {
            number: results.in_process("traffic", "--processes", str(number), *norm)
            for number in PROCESSES
        }
        for norm in ((), ("--norm",))
    }
    tables = {
        part.capitalize(): table(counted[()], part)
        for part in ("rendezvous", "start", "evaluation")
    }
    tables["A step"] = table(counted[()], "step", num_weights=2_570)
    tables["A step with a batch norm of 256 channels"] = table(
        counted["--norm",], "step", num_weights=3_082
    )
    results.write(
        "traffic",
        title="What is sent beside the gradients",
        how="A model of 2,570 weights, gloo on loopback, counted by `ss` for each process's TCP "
        f"connections; a step is the mean of {NUM_STEPS}, without the bytes of the gradients; "
        "the evaluation has 1,000 samples. The start holds the comparison of versions, code, "
        "config and data, DDP's broadcast of the weights, and the resume; checkpoints are "
        "not sent. The last rows continue in a line from 4 and 8 processes: nothing beyond 8 "
        "was counted.",
        tables=tables,
        started=started,
    )


if __name__ == "__main__":
    main()
