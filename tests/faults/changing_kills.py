"""Kills runs with parts of a user's own, and starts them again until they are done: same bytes?

    python -m tests.faults.changing_kills --number 60 --cases buffers --folder changing

`buffers`: forwards that assign and count, with a NaN that is skipped, on one and two processes by
turns with `--reduce exact`. `optimizers`: state of any form, and weights of other layouts and
dtypes. `compile`: more variants than torch's recompile limit. `shards`: all of these that shard,
saved whole or by each process. `training`: the settings of `training_run`, with SIGTERM and SIGUSR2
between the kills.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ExitCode,
    OptimizerConfig,
    ScheduleConfig,
)
from tests import processes, workload
from tests.changing_net import NETS as CHANGING_NETS
from tests.checkpoint.sharded_run import KINDS
from tests.checkpoint.test_unsaved_state import Counting, Lookahead
from tests.distributed.test_fsdp_models import NETS as SHARDED_NETS
from tests.faults import training_run
from tests.faults.training_run import NUM_INTERRUPTIONS
from tests.optim.test_evaluation_weights import ScheduleFree
from tests.optim.test_fused import OddNet
from tests.training.step.test_nonfinite_report import Poisoned
from tests.training.test_compile import ManyVariants, NumberNet
from tests.training.test_exactness import final_files

# As a launcher does, the campaign ends a process that outlives its peer: in 1 of 1,000 kills, gloo
# waits for its own timeout (torch 2.13).
SURVIVOR_TIMEOUT_S = 120.0


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


class Kind(Protocol):
    """A kind of run."""

    @property
    def num_processes(self) -> tuple[int, ...]:
        """Those of its attempts, by turns."""

    @property
    def num_workers(self) -> int:
        """The data workers of each process."""

    def draw(self, draw: random.Random, attempt: int) -> Any:
        """Return how an attempt is interrupted."""

    def train(self, folder: Path, interruption: Any) -> None:
        """Train in this process of a launch; `interruption` may be None."""

    def left_by(self, folder: Path) -> dict[str, Any]:
        """Return all that a run leaves, by name, without times."""


@dataclass(frozen=True)
class Case:
    """A run with parts of a user's own. `shards` is a kind of `sharded_run`."""

    net: str
    num_processes: tuple[int, ...]
    num_workers: int = 0
    reduce: str = "float"
    optimizer: str = ""
    shards: str = "whole"
    has_nan: bool = False
    compiles: bool = False
    is_cut_in_a_save: bool = False

    def draw(self, draw: random.Random, attempt: int) -> tuple[int, int, float]:
        """Return a process to kill, after which step, and after which delay in seconds."""
        num_processes = self.num_processes[attempt % len(self.num_processes)]
        max_delay_s = 0.01 if self.is_cut_in_a_save else 0.05
        return draw.randrange(num_processes), draw.choice((2, 3)), draw.uniform(0, max_delay_s)

    def train(self, folder: Path, kill: tuple[int, int, float] | None) -> None:
        """Train in this process of a launch."""
        train(folder, self, kill)

    def left_by(self, folder: Path) -> dict[str, Any]:
        """Return all that a run leaves, by name, without times."""
        newest = max((folder / "checkpoints").glob("step-*"))
        slices = {
            f"{path.parent.name}/{path.name}": path.read_bytes() for path in newest.glob("*/*")
        }
        export = (folder / "export" / "model.safetensors").read_bytes()
        return {**final_files(folder), **slices, "export": export}


CASES: dict[str, Sequence[Kind]] = {
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
    "training": training_run.CASES,
}


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


def survive(
    folder: Path, kind: Kind, whole: dict[str, Any], draw: random.Random
) -> tuple[list[str], int, int]:
    """Interrupt a run repeatedly, and let it end.

    Returns what is wrong, or differs from `whole`, and how many attempts were killed and preempted.
    """
    wrong: list[str] = []
    num_killed = num_preempted = 0
    for number in range(NUM_INTERRUPTIONS + 1):
        interruption = kind.draw(draw, number) if number < NUM_INTERRUPTIONS else None
        codes, said = attempt(folder, kind, interruption, number)
        was_killed = -signal.SIGKILL in codes
        num_killed += was_killed
        num_preempted += not was_killed and ExitCode.PREEMPTED in codes
        allowed = {0} if interruption is None else {0, ExitCode.PREEMPTED}
        if not (was_killed or allowed.issuperset(codes)):
            wrong.append(f"{interruption} ended with {codes}: {said[-300:]}")
    if not wrong:
        left = kind.left_by(folder / "run")
        wrong = [name for name in {**left, **whole} if left.get(name) != whole.get(name)]
    return wrong, num_killed, num_preempted


def attempt(
    folder: Path, kind: Kind, interruption: Any, number: int = 0
) -> tuple[list[int | None], str]:
    """Start the run once; return the exit codes, and what the main process said."""
    job = processes.start(
        kind.train,
        folder / "run",
        interruption,
        num_processes=kind.num_processes[number % len(kind.num_processes)],
        folder=folder / f"logs-{number}",
        has_workers=kind.num_workers > 0,
    )
    codes = job.wait() if interruption is None else job.wait(SURVIVOR_TIMEOUT_S)
    return codes, job.output()


def campaign(
    folder: Path, number: int, kinds: Sequence[Kind], first: int = 0
) -> tuple[list[str], Counter[str]]:
    """Deliver at least `number` kills, one run of each kind in turn.

    Returns what is wrong or differs, and the kills by kind.
    """
    problems: list[str] = []
    kills: Counter[str] = Counter()
    num_preempted = 0
    undisturbed: dict[Kind, dict[str, Any]] = {}
    for trial in range(first, first + 2 * number):
        kind = kinds[trial % len(kinds)]
        if kind not in undisturbed:
            whole = folder / f"whole-{len(undisturbed)}"
            codes, said = attempt(whole, kind, None)
            assert not any(codes), said
            undisturbed[kind] = kind.left_by(whole / "run")
        scratch = folder / f"trial-{trial}"
        wrong, killed, preempted = survive(scratch, kind, undisturbed[kind], random.Random(trial))
        kills[str(kind)] += killed
        num_preempted += preempted
        if wrong:
            problems.append(f"trial {trial}, {kind}: {', '.join(wrong)}")
        else:
            shutil.rmtree(scratch)
        done = f"{trial + 1 - first} runs, {kills.total()} kills, {num_preempted} preemptions"
        print(f"{done}, {len(problems)} different", flush=True)
        if kills.total() >= number:
            break
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
    print("\n".join(f"{count:4} kills: {kind}" for kind, count in kills.items()))
    print(f"{kills.total()} kills, {len(problems)} runs differ")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
