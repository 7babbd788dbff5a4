"""Kills runs whose forward changes buffers in its own way, and starts them again until they are done: same bytes?

    python -m tests.faults.changing_kills --number 60 --folder changing

Buffers that are assigned, averaged, undone after a NaN, counted in integers, on one and two processes by turns with
`--reduce exact`, and on two processes with shards.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accel_trainer import BatchConfig, CheckpointConfig
from tests import processes, workload
from tests.changing_net import NETS
from tests.fault_tolerance.test_nonfinite_guard import Poisoned
from tests.faults.elastic import KillSoonAfter
from tests.joined import FSDP
from tests.training.test_exactness import final_files

SURVIVOR_TIMEOUT_S, NUM_KILLS_OF_A_RUN = 60.0, 3


@dataclass(frozen=True)
class Case:
    """A kind of run: its net, how gradients are added up, the processes of its attempts by turns, shards, and a NaN."""

    net: str
    reduce: str
    num_processes: tuple[int, ...]
    has_shards: bool = False
    has_nan: bool = False


CASES = [
    Case("assigned", "float", (1,), has_nan=True),
    Case("usage", "float", (2,), has_nan=True),
    Case("assigned", "exact", (1, 2)),
    Case("samples", "exact", (2, 1), has_nan=True),
    Case("usage", "exact", (1, 2)),
    Case("usage", "float", (2,), has_shards=True),
]


def train(folder: Path, case: Case, kill: tuple[int, int, float] | None) -> None:
    """Train, with a process to kill, after which step, and after which delay in seconds."""
    if case.has_shards:
        os.environ.update(FSDP)
    torch.manual_seed(0)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    size = 2 if case.reduce == "exact" else 16 // num_processes
    batch = BatchConfig(per_device_batch_size=size, global_batch_size=16, eval_batch_size=4, reduce=case.reduce)
    config = workload.make_config(folder, batch=batch, checkpoint=CheckpointConfig(every_n_steps=1))
    config = replace(config, trainer=replace(config.trainer, num_epochs=3, on_nonfinite="skip"))
    is_hit = kill is not None and kill[0] == int(os.environ.get("RANK", 0))
    callbacks = (KillSoonAfter(*kill[1:]),) if kill is not None and is_hit else ()
    task = Poisoned() if case.has_nan else None
    workload.train(config, num_train=64, task=task, net=NETS[case.net], callbacks=callbacks)


def hash_of(folder: Path) -> str:
    """Return a hash of all that a run leaves, without times."""
    files = {**final_files(folder), "export": (folder / "export" / "model.safetensors").read_bytes()}
    return hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()[:16]


def survive(folder: Path, case: Case, draw: random.Random) -> tuple[str, int]:
    """Kill a run again and again, let it end, and return its hash and how often a process was killed."""
    num_killed = 0
    for number in range(NUM_KILLS_OF_A_RUN + 1):
        num_processes = case.num_processes[number % len(case.num_processes)]
        is_last = number == NUM_KILLS_OF_A_RUN
        kill = None if is_last else (draw.randrange(num_processes), draw.choice((2, 3)), draw.uniform(0, 0.05))
        arguments = (folder / "run", case, kill)
        job = processes.start(train, *arguments, num_processes=num_processes, folder=folder / f"logs-{number}")
        codes = job.wait(SURVIVOR_TIMEOUT_S)
        num_killed += -signal.SIGKILL in codes
        if is_last and any(codes):
            return f"ended with {codes}: {job.output()[-300:]}", num_killed
    return hash_of(folder / "run"), num_killed


def campaign(folder: Path, number: int, cases: list[Case] = CASES) -> tuple[list[str], Counter[str]]:
    """Deliver at least `number` kills, one run of each case by turns; return what differs, and the kills by case."""
    folder.mkdir(exist_ok=True)
    problems: list[str] = []
    kills: Counter[str] = Counter()
    hashes: dict[Case, str] = {}
    for case in cases:
        whole = folder / f"whole-{len(hashes)}"
        count = case.num_processes[0]
        processes.run(train, whole, case, None, num_processes=count, folder=whole.with_suffix(".logs"))
        hashes[case] = hash_of(whole)
    trial = 0
    while kills.total() < number and trial < 2 * number:
        case = cases[trial % len(cases)]
        found, num_killed = survive(folder / f"trial-{trial}", case, random.Random(trial))
        kills[str(case)] += num_killed
        if found != hashes[case]:
            problems.append(f"trial {trial}, {case}: {found}, and {hashes[case]} without a kill")
        shutil.rmtree(folder / f"trial-{trial}")
        trial += 1
    return problems, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    problems, kills = campaign(options.folder, options.number)
    print("\n".join(f"{count:4} kills: {case}" for case, count in kills.items()))
    print(f"{kills.total()} kills, {len(problems)} runs differ")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
