"""Interrupt runs at random moments of each phase and restart them until they are done.

Is anything different?

    python -m tests.faults.interruptions --number 200 --log interruptions.jsonl

The log has a line for each trial. The same command continues after the last one, and then prints
the counts by phase.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accel_trainer import BatchConfig, CheckpointConfig, ClassificationTask, RecipeConfig, main
from accel_trainer.callbacks.result import ResultWriter
from accel_trainer.checkpoint import manager
from accel_trainer.vision import AugmentedImageReader
from tests import processes, workload
from tests.faults.campaign import run_campaign
from tests.faults.crash import outcome
from tests.programs.faults import act_in_call

SIGNALS = ("TERM", "INT", "USR1", "HUP", "KILL")
NUM_STEPS = 24
NUM_EVALUATIONS = 2
NUM_EVAL_BATCHES = {1: 8, 2: 4}
MAX_DELAY_S = 0.02
MAX_STARTS = 6
SURVIVOR_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Trial:
    """A signal to a rank, so many seconds after a call that begins a moment of `phase`."""

    number: int
    signal: str
    phase: str
    call: int
    delay_s: float
    rank: int
    num_processes: int


def draw_trial(number: int) -> Trial:
    """Return a trial; every other one falls into the last evaluation."""
    draw = random.Random(number)
    num_processes = 1 + number // 2 % 2
    batches = NUM_EVAL_BATCHES[num_processes]
    calls = {
        "start": (1, 1),
        "data": (1, NUM_STEPS),
        "step": (1, NUM_STEPS),
        "save": (1, 8),
        "evaluation": (1, batches),
        "last evaluation": (batches + 1, NUM_EVALUATIONS * batches),
        "end": (1, 1),
    }
    phase = (
        "last evaluation"
        if number % 2
        else draw.choice([name for name in calls if name != "last evaluation"])
    )
    rank = 0 if phase in ("save", "end") else draw.randrange(num_processes)
    call = draw.randint(*calls[phase])
    delay_s = draw.uniform(0, MAX_DELAY_S)
    return Trial(number, draw.choice(SIGNALS), phase, call, delay_s, rank, num_processes)


MOMENTS: dict[str, tuple[Any, str]] = {
    "start": (workload, "SmallNet"),
    "data": (AugmentedImageReader, "finish"),
    "step": (ClassificationTask, "step"),
    "save": (manager, "write_checkpoint"),
    "evaluation": (ClassificationTask, "eval_step"),
    "last evaluation": (ClassificationTask, "eval_step"),
    "end": (ResultWriter, "on_fit_end"),
}


def train(folder: Path, trial: Trial | None) -> None:
    """What every start of a run does; the first has the trial in it."""
    for name in SIGNALS[:4]:  # whoever runs the tests may ignore some, as a background job does
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
    if trial is not None and trial.rank == int(os.environ.get("RANK", 0)):
        number = getattr(signal, f"SIG{trial.signal}")
        interrupt = threading.Timer(trial.delay_s, os.kill, (os.getpid(), number))
        interrupt.daemon = True
        act_in_call(*MOMENTS[trial.phase], trial.call, interrupt.start)
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=8, global_batch_size=16, eval_batch_size=10),
        checkpoint=CheckpointConfig(every_n_steps=4, keep_last_n=2),
    )
    config = replace(
        config, trainer=replace(config.trainer, num_epochs=4, evaluate_every="2epochs")
    )
    main(
        lambda _: workload.train(config, num_train=96, dropout=0.1),
        RecipeConfig,
        description="",
        argv=[],
    )


def run_trial(trial: Trial, scratch: Path, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Return how it went: the exit codes of each start, and what differs in the final outcome."""
    codes: list[list[int | None]] = []
    said = ""
    while len(codes) < MAX_STARTS and (not codes or any(codes[-1])):
        logs = scratch / f"logs-{len(codes)}"
        job = processes.start(
            train,
            scratch / "run",
            None if codes else trial,
            num_processes=trial.num_processes,
            folder=logs,
        )
        codes.append(job.wait(SURVIVOR_TIMEOUT_S))
        said = job.output()
    final = end_of(scratch / "run")
    differing = sorted(
        name for name in {*final, *undisturbed} if final.get(name) != undisturbed.get(name)
    )
    is_landed = any(codes[0])
    bad_codes = [code for start in codes[1:] for code in start if code != 0]
    is_ok = not differing and not bad_codes
    return {
        **asdict(trial),
        "codes": codes,
        "landed": is_landed,
        "ok": is_ok,
        "differing": differing,
    } | ({} if is_ok else {"said": said})


def run_undisturbed(scratch: Path) -> dict[int, dict[str, Any]]:
    for n in (1, 2):
        processes.run(
            train, scratch / f"whole-{n}", None, num_processes=n, folder=scratch / f"whole-logs-{n}"
        )
    return {n: end_of(scratch / f"whole-{n}") for n in (1, 2)}


def end_of(run: Path) -> dict[str, Any]:
    """Return what a run leaves, with its newest checkpoint only.

    A preemption adds a checkpoint, which takes the place of an older one.
    """
    files = outcome(run)
    newest = max(name.split("/")[1] for name in files if name.startswith("checkpoints/step-"))
    return {
        name: value
        for name, value in files.items()
        if not name.startswith("checkpoints/step-") or name.startswith(f"checkpoints/{newest}/")
    }


def as_table(results: list[dict[str, Any]]) -> str:
    """Return the counts by phase and number of processes.

    A signal landed if the run was on; a run is equal if it ended as the undisturbed one.
    """
    landed: Counter[tuple[str, int]] = Counter()
    passed: Counter[tuple[str, int]] = Counter()
    total: Counter[tuple[str, int]] = Counter()
    for result in results:
        key = result["phase"], result["num_processes"]
        total[key] += 1
        landed[key] += result["landed"]
        passed[key] += result["ok"]
    lines = [f"{'phase':<17}" + "".join(f"{f'{n} process' + 'es' * (n > 1):>34}" for n in (1, 2))]
    for phase in MOMENTS:
        cells = (
            f"{total[phase, n]} sent, {landed[phase, n]} landed, {passed[phase, n]} equal"
            for n in (1, 2)
        )
        lines.append(f"{phase:<17}" + "".join(f"{cell:>34}" for cell in cells))
    lines.append(
        f"{total.total()} signals, {landed.total()} while the run was on; "
        f"{passed.total()} runs ended as undisturbed"
    )
    return "\n".join(lines)


def prepare(scratch: Path) -> Callable[[int], dict[str, Any]]:
    undisturbed = run_undisturbed(scratch)

    def run(number: int) -> dict[str, Any]:
        trial = draw_trial(number)
        return run_trial(trial, scratch / str(number), undisturbed[trial.num_processes])

    return run


def command_line() -> None:
    results = run_campaign(prepare, number=200)
    print(as_table(results))
    sys.exit(not all(result["ok"] for result in results))


if __name__ == "__main__":
    command_line()
