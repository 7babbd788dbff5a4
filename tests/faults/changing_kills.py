"""Kills runs with parts of a user's own, and starts them again until they are done: same bytes?

    python -m tests.faults.changing_kills --number 60 --cases buffers --folder changing

`buffers`: forwards that assign and count, with a NaN that is skipped, on one and two processes by
turns with `--reduce exact`. `optimizers`: state of any form, and weights of other layouts and
dtypes. `compile`: more variants than torch's recompile limit. `shards`: all of these that shard,
saved whole or by each process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from accel_trainer import BatchConfig, Callback, CheckpointConfig, OptimizerConfig, ScheduleConfig
from tests import processes, workload
from tests.changing_net import NETS as CHANGING_NETS
from tests.checkpoint.sharded_run import KINDS
from tests.checkpoint.test_unseen_state import Counting, Lookahead
from tests.distributed.test_fsdp_models import NETS as SHARDED_NETS
from tests.fault_tolerance.test_nonfinite_guard import Poisoned
from tests.faults.elastic import KillSoonAfter
from tests.optim.test_evaluation_weights import ScheduleFree
from tests.optim.test_fused import OddNet
from tests.training.test_compile import ManyVariants, NumberNet
from tests.training.test_exactness import final_files

SURVIVOR_TIMEOUT_S = 120.0
NUM_KILLS_OF_A_RUN = 3


class OddForm(AdamW):
    """Keeps beside each weight a slow copy, a tuple and a dict, and a count in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                state["seen"] = {"counts": (group["count"], None), "rates": [1 / group["count"]]}
                slow.lerp_(parameter, state["seen"]["rates"][0])
                parameter.lerp_(slow, 0.1)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "counting": Counting,
    "lookahead": Lookahead,
    "odd form": OddForm,
    "schedule-free": lambda parameters: ScheduleFree(parameters, lr=0.05),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}
NETS: dict[str, Callable[[], nn.Module]] = {
    **SHARDED_NETS,
    **CHANGING_NETS,
    "odd weights": lambda: OddNet(norm="group", dropout=0.0),
    "reads a number": lambda: NumberNet(norm="group", dropout=0.0),
    "many shapes": lambda: workload.SmallNet(norm="group"),
}


@dataclass(frozen=True)
class Case:
    """A kind of run.

    `num_processes` are those of its attempts, by turns; `shards` is a kind of `sharded_run`.
    """

    net: str
    num_processes: tuple[int, ...]
    reduce: str = "float"
    optimizer: str = ""
    shards: str = "whole"
    has_nan: bool = False
    compiles: bool = False
    is_cut_in_a_save: bool = False


CASES = {
    "buffers": [
        Case("assigned", (1,), has_nan=True),
        Case("usage", (2,), has_nan=True),
        Case("assigned", (1, 2), reduce="exact"),
        Case("samples", (2, 1), reduce="exact", has_nan=True),
        Case("usage", (1, 2), reduce="exact"),
    ],
    "optimizers": [
        Case("assigned", (1,), optimizer="counting", has_nan=True),
        Case("assigned", (2,), optimizer="lookahead", is_cut_in_a_save=True),
        Case("usage", (1, 2), reduce="exact", optimizer="odd form"),
        Case("assigned", (2,), optimizer="schedule-free"),
        Case("tied weights", (2,), optimizer="odd form", is_cut_in_a_save=True),
        Case("odd weights", (1,)),
        Case("odd weights", (1, 2), reduce="exact", optimizer="momentum"),
    ],
    "compile": [
        Case("many shapes", (2,), compiles=True),
        Case("reads a number", (2,), compiles=True),
        Case("assigned", (2,), compiles=True),
        Case("reads a number", (1, 2), reduce="exact", compiles=True),
    ],
    "shards": [
        Case("usage", (2,), shards="gathered"),
        Case("usage", (2,), shards="sharded", has_nan=True),
        Case("assigned", (2,), shards="sharded", is_cut_in_a_save=True),
        Case("assigned", (2,), shards="gathered", optimizer="counting", is_cut_in_a_save=True),
        Case("usage", (2,), shards="sharded", optimizer="odd form"),
        Case("a transformer", (2,), shards="gathered", optimizer="odd form", is_cut_in_a_save=True),
        Case("a transformer", (2,), shards="sharded", optimizer="schedule-free"),
        Case("assigned", (2,), shards="gathered", optimizer="schedule-free", has_nan=True),
        Case("tied weights", (2,), shards="sharded", optimizer="momentum", is_cut_in_a_save=True),
        Case("containers", (2,), shards="gathered", optimizer="momentum"),
    ],
}


class KillInSave(Callback):
    """Kills its process soon after the save at this attempt's `number`-th step began to write."""

    def __init__(self, folder: Path, number: int, delay_s: float) -> None:
        self._checkpoints = folder / "checkpoints"
        self._left = number
        self._delay_s = delay_s

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self._left -= 1
        if self._left == 0:
            threading.Thread(target=self._wait_and_kill, daemon=True).start()

    def _wait_and_kill(self) -> None:
        while not list(self._checkpoints.glob(".tmp-*")):
            time.sleep(0.0002)
        time.sleep(self._delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, case: Case, kill: tuple[int, int, float] | None) -> None:
    """Train, with a process to kill, after which step, and after which delay in seconds."""
    os.environ.update(KINDS[case.shards])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent.parent / "kernels")
    torch.manual_seed(0)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    size = 2 if case.reduce == "exact" else 16 // num_processes
    batch = BatchConfig(
        per_device_batch_size=size, global_batch_size=16, eval_batch_size=4, reduce=case.reduce
    )
    config = workload.make_config(folder, batch=batch, checkpoint=CheckpointConfig(every_n_steps=1))
    if case.optimizer:
        config = replace(config, optimizer=OptimizerConfig(), schedule=ScheduleConfig())
    has_average = case.optimizer != "schedule-free"
    config = replace(
        config,
        trainer=replace(
            config.trainer,
            num_epochs=3,
            on_nonfinite="skip",
            ema_decay=0.9 if has_average else None,
        ),
        runtime=replace(config.runtime, compile=case.compiles),
    )
    callbacks: tuple[Callback, ...] = ()
    if kill is not None and kill[0] == int(os.environ.get("RANK", 0)):
        callbacks = (
            KillInSave(folder, *kill[1:]) if case.is_cut_in_a_save else KillSoonAfter(*kill[1:]),
        )
    workload.train(
        config,
        num_train=64,
        task=Poisoned() if case.has_nan else ManyVariants() if case.net == "many shapes" else None,
        net=NETS[case.net],
        optimizer=(lambda model: OPTIMIZERS[case.optimizer](model.parameters()))
        if case.optimizer
        else None,
        schedule=(lambda step: 0.05) if case.optimizer else None,
        callbacks=callbacks,
    )


def hash_of(folder: Path) -> str:
    """Return a hash of all that a run leaves, without times."""
    newest = max((folder / "checkpoints").glob("step-*"))
    slices = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in newest.glob("*/*")}
    files = {
        **final_files(folder),
        **slices,
        "export": (folder / "export" / "model.safetensors").read_bytes(),
    }
    return hashlib.sha256(
        b"".join(name.encode() + files[name] for name in sorted(files))
    ).hexdigest()[:16]


def survive(folder: Path, case: Case, draw: random.Random) -> tuple[str, int]:
    """Kill a run repeatedly, let it end; return its hash and how often a process was killed."""
    num_killed = 0
    max_delay_s = 0.01 if case.is_cut_in_a_save else 0.05
    for number in range(NUM_KILLS_OF_A_RUN + 1):
        num_processes = case.num_processes[number % len(case.num_processes)]
        is_last = number == NUM_KILLS_OF_A_RUN
        kill = (
            None
            if is_last
            else (draw.randrange(num_processes), draw.choice((2, 3)), draw.uniform(0, max_delay_s))
        )
        arguments = (folder / "run", case, kill)
        job = processes.start(
            train, *arguments, num_processes=num_processes, folder=folder / f"logs-{number}"
        )
        codes = job.wait(SURVIVOR_TIMEOUT_S)
        num_killed += -signal.SIGKILL in codes
        if is_last and any(codes):
            return f"ended with {codes}: {job.output()[-300:]}", num_killed
    return hash_of(folder / "run"), num_killed


def campaign(
    folder: Path, number: int, cases: list[Case], first: int = 0
) -> tuple[list[str], Counter[str]]:
    """Deliver at least `number` kills, one run of each case in turn.

    Returns what differs, and the kills by case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    kills: Counter[str] = Counter()
    hashes: dict[Case, str] = {}
    for case in cases:
        whole = folder / f"whole-{len(hashes)}" / "run"
        count = case.num_processes[0]
        processes.run(
            train, whole, case, None, num_processes=count, folder=whole.with_suffix(".logs")
        )
        hashes[case] = hash_of(whole)
    trial = 0
    while kills.total() < number and trial < 2 * number:
        case = cases[trial % len(cases)]
        found, num_killed = survive(folder / f"trial-{trial}", case, random.Random(first + trial))
        kills[str(case)] += num_killed
        if found != hashes[case]:
            problems.append(
                f"trial {first + trial}, {case}: {found}, and {hashes[case]} without a kill"
            )
        else:
            shutil.rmtree(folder / f"trial-{trial}")
        trial += 1
        print(f"{trial} runs, {kills.total()} kills, {len(problems)} different", flush=True)
    return problems, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--cases", choices=CASES, default="buffers")
    parser.add_argument(
        "--first", type=int, default=0, help="the first trial's number, which decides its kills"
    )
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    problems, kills = campaign(options.folder, options.number, CASES[options.cases], options.first)
    print("\n".join(f"{count:4} kills: {case}" for case, count in kills.items()))
    print(f"{kills.total()} kills, {len(problems)} runs differ")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
