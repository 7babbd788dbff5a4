"""Signals to programs that train one run after the other: none goes on with the next run.

A program trains three runs: folds, the trials of a search that tries the next one after an error,
or models of several sizes. In the second one it gets a signal at some place; the same program,
started again, must end with the results of one that got none.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RunResult,
    RuntimeConfig,
    TrainerConfig,
    build_trainer,
    fold,
    start_run,
)
from tests import processes

KINDS = ("folds", "trials", "models", "loops")
PLACES = ("start", "data", "step", "evaluation", "save", "end", "block", "between")
SIGNALS = ("TERM", "INT", "USR1", "HUP", "KILL")
NUM_SAMPLES = 48


@dataclass(frozen=True)
class Case:
    """A signal to all processes, or to the last one, in the second run of a program."""

    kind: str
    place: str
    signal: str
    num_processes: int = 1
    is_to_all: bool = True
    number: int = 1
    """How often the place is passed before."""
    is_quiet: bool = True

    def __str__(self) -> str:
        receiver = "all" if self.is_to_all else "last"
        where = f"{self.place}-{self.number}-{receiver}-{self.num_processes}"
        return f"{self.kind}-{self.signal}-{where}{'' if self.is_quiet else '-loud'}"

    @property
    def is_stopped_by_python(self) -> bool:
        """Whether there is no run that could take the signal."""
        return self.place == "between" or self.signal == "KILL"


def any_case(draw: random.Random) -> Case:
    place = draw.choice(PLACES)
    number = draw.choice(SIGNALS)
    count = draw.choice((1, 1, 2))
    times = draw.randint(1, {"data": 100, "step": 8, "evaluation": 2, "save": 4}.get(place, 1))
    is_to_all = place == "between" or number == "KILL" or draw.random() < 0.5
    return Case(draw.choice(KINDS), place, number, count, is_to_all, times, draw.random() < 0.7)


# --- the program ---


class Interruption:
    """Sends this process the signal of a case, once."""

    unsaved_attributes = ("passed", "run")

    def __init__(self, case: Case | None) -> None:
        self.case = case
        self.run = 0
        self.passed: Counter[str] = Counter()

    def at(self, place: str) -> None:
        case = self.case
        if case is None or self.run != 1 or place != case.place:
            return
        self.passed[place] += 1
        rank = int(os.environ.get("RANK", "0"))
        if self.passed[place] == case.number and (case.is_to_all or rank == case.num_processes - 1):
            os.kill(os.getpid(), getattr(signal, f"SIG{case.signal}"))


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, ids: Tensor, interruption: Interruption) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)[ids]
        self.interruption = interruption

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.interruption.at("data")
        return self.inputs[index], self.inputs[index, :3].argmax()


class Interrupts(Callback):
    def __init__(self, interruption: Interruption) -> None:
        self.interruption = interruption

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.interruption.at("step")

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        self.interruption.at("evaluation")

    def on_checkpoint(self, trainer: Any, name: str) -> None:
        self.interruption.at("save")

    def on_fit_end(self, trainer: Any, result: RunResult) -> None:
        self.interruption.at("end")


def program(folder: Path, kind: str, case: Case | None) -> None:
    """Train three runs in `folder`, and write their results to `results-RANK.json`."""
    for number in SIGNALS[:-1]:  # whoever runs the tests may ignore some, as a background job does
        signal.signal(getattr(signal, f"SIG{number}"), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interruption = Interruption(case)
    results = []
    for result in {"trials": _trials}.get(kind, _one_after_the_other)(folder, kind, interruption):
        results.append((result.state, result.position.optimizer_step, result.metrics["eval/loss"]))
        interruption.at("between")
        interruption.run += 1
    path = folder / f"results-{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(results))


def _one_after_the_other(
    folder: Path, kind: str, interruption: Interruption
) -> Iterator[RunResult]:
    for number in range(3):
        yield _train(folder, kind, number, interruption)


def _trials(folder: Path, kind: str, interruption: Interruption) -> Iterator[RunResult]:
    """Go on after an error, as a search over hyperparameters does."""
    for number in range(3):
        try:
            result = _train(folder, kind, number, interruption)
        except Exception as error:
            print(f"trial {number} failed: {error}")
            interruption.run += 1
        else:
            yield result


def _train(folder: Path, kind: str, number: int, interruption: Interruption) -> RunResult:
    parts = fold(NUM_SAMPLES, 3, number if kind == "folds" else 0)
    train_set, eval_set = (Points(torch.as_tensor(part), interruption) for part in parts)
    width = 4 * (number + 1) if kind == "models" else 4
    rate = 0.02 * (number + 1) if kind == "trials" else 0.05
    config = RecipeConfig(
        seed=number if kind == "loops" else 0,
        batch=BatchConfig(global_batch_size=8),
        trainer=TrainerConfig(num_epochs=2),
        optimizer=OptimizerConfig(learning_rate=rate),
        checkpoint=CheckpointConfig(every_n_steps=2),
        runtime=RuntimeConfig(num_threads=1, timeout_s=300),
        run=RunConfig(
            output_dir=folder / f"run-{number}",
            quiet=interruption.case is None or interruption.case.is_quiet,
        ),
    )
    with start_run(config, recipe="several") as run:
        interruption.at("start")
        net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
        trainer = build_trainer(
            run,
            model=net,
            task=ClassificationTask(),
            train_set=train_set,
            eval_sets=eval_set,
            callbacks=[Interrupts(interruption)],
        )
        if kind == "loops":
            with trainer.running() as reports:
                for _ in reports:
                    pass
        else:
            trainer.fit()
        interruption.at("block")
    assert trainer.result is not None
    return trainer.result


# --- what it must leave ---


def left(folder: Path) -> dict[str, bytes]:
    """Return the results and the exported weights."""
    paths = [*folder.glob("results-*.json"), *folder.glob("run-*/export/model.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def run_case(case: Case, folder: Path, undisturbed: dict[str, bytes]) -> str:
    """Run a case, assert all promises; return where the program stopped and continued."""
    shape: dict[str, Any] = {"num_processes": case.num_processes}
    job = processes.start(program, folder, case.kind, case, folder=folder / "logs", **shape)
    codes = job.wait()
    output = "".join(job.output(rank) for rank in range(case.num_processes))
    assert not [*folder.glob("results-*")], f"went on after the signal: {codes}\n{output}"
    assert not (folder / "run-2").exists(), f"went on with the next run: {codes}\n{output}"
    assert 0 not in codes, (codes, output)
    if not case.is_stopped_by_python:
        assert codes == [75] * case.num_processes, (codes, output)
        assert "Traceback" not in output, output
        said = [line for line in output.splitlines() if "run the same command" in line]
        assert len(said) == 1, output
        assert f"SIG{case.signal}" in said[0], output
        if case.is_quiet:
            assert output.splitlines() == said, output
    logs = folder / "logs-again"
    again = processes.run(program, folder, case.kind, None, folder=logs, **shape)
    assert left(folder) == undisturbed, again.output()
    attempts = (folder / "run-1" / "attempts.jsonl").read_text().splitlines()
    starts = [row for row in map(json.loads, attempts) if row["event"] == "start"]
    return f"{codes[0]} and on from run 1, step {starts[-1]['optimizer_step']}"


def run_whole(folder: Path, kind: str, num_processes: int) -> dict[str, bytes]:
    arguments = (folder, kind, None)
    processes.run(program, *arguments, num_processes=num_processes, folder=folder / "logs")
    return left(folder)
