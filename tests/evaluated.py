"""A small run that evaluates within its epochs, on several sets and on a test set at its end."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    ClassificationTask,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RunResult,
    RuntimeConfig,
    TopKAccuracy,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.callbacks.metric_logger import MetricLogger
from accel_trainer.run import build
from tests import processes
from tests.programs import left
from tests.variants import NUM_THREADS

NUM_CLASSES = 3
SIZES = {"val": 13, "hard": 7, "test": 9}


class Points:
    """Points around the corner of their class, with noise that is drawn at each reading."""

    def __init__(self, size: int, *, seed: int, noise: float = 0.0, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % NUM_CLASSES
        self.points = spread * torch.randn(size, 6, generator=generator)
        self.points[torch.arange(size), self.labels] += 1.5
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        return point + self.noise * torch.randn(point.shape), self.labels[index]


def train_set(size: int = 38) -> Points:
    return Points(size, seed=0, noise=0.3)


def eval_sets(*names: str) -> Any:
    """Return the sets by name; a set without a name if there are none."""
    sets = {
        name: Points(SIZES[name], seed=number, spread=number)
        for number, name in enumerate(SIZES, start=1)
    }
    return {name: sets[name] for name in names} if names else sets["val"]


def test_set() -> Points:
    return Points(SIZES["test"], seed=9)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, NUM_CLASSES))


def make_config(
    folder: Path,
    *,
    batch: Any = None,
    every: int | None = 4,
    resume: str = "auto",
    allow: tuple[str, ...] = (),
    optimizer: OptimizerConfig | None = None,
    **trainer: Any,
) -> RecipeConfig:
    """Return a config of 3 epochs of 5 steps, the last one short, that evaluates at every 3rd."""
    settings = {"num_epochs": 3, "evaluate_every": "3steps", "log_every_n_steps": 4} | trainer
    return RecipeConfig(
        seed=3,
        batch=replace(
            BatchConfig(per_device_batch_size=4, global_batch_size=8, eval_batch_size=5),
            **(batch or {}),
        ),
        trainer=TrainerConfig(**settings),
        optimizer=OptimizerConfig(learning_rate=0.05) if optimizer is None else optimizer,
        checkpoint=CheckpointConfig(every_n_steps=every),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, quiet=True, resume=resume, allow_change=allow),
    )


def train(
    config: RecipeConfig,
    *,
    sets: Any = None,
    fit: Callable[[Trainer], RunResult] = Trainer.fit,
    **parts: Any,
) -> RunResult:
    """Train; `parts` are other arguments of `build_trainer`."""
    defaults: dict[str, Any] = {
        "task": ClassificationTask(),
        "train_set": train_set(),
        "metrics": [MeanLoss(), TopKAccuracy()],
    }
    with start_run(config, recipe="evaluated") as run:
        sets = eval_sets() if sets is None else sets
        model = parts.pop("model", None) or make_net()
        return fit(build_trainer(run, model=model, eval_sets=sets, **{**defaults, **parts}))


# --- interruptions ---

MOMENTS: Mapping[str, tuple[Any, str]] = {
    "step": (Trainer, "train_step"),
    "evaluation": (ClassificationTask, "eval_step"),
    "result": (MetricLogger, "on_evaluate_end"),
    "test": (build, "load_best_weights"),
}


@dataclass(frozen=True)
class Interruption:
    """A signal to the last rank, before a call of the function that `moment` names."""

    signal: str
    moment: str
    call: int


def interrupt(interruption: Interruption) -> None:
    """Send this process the signal at the moment."""
    owner, name = MOMENTS[interruption.moment]
    number = getattr(signal, f"SIG{interruption.signal}")
    function = getattr(owner, name)
    calls = itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == interruption.call:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    setattr(owner, name, interrupted)


def attempt(
    config: RecipeConfig, interruption: Interruption | None, make_parts: Callable[[], Any]
) -> None:
    """Train in this process of a launch, perhaps interrupted."""
    is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if interruption is not None and is_last:
        interrupt(interruption)
    result = train(config, **make_parts())
    raise SystemExit(75 if result.state == "preempted" else 0)


def all_sets() -> dict[str, Any]:
    """Two evaluation sets and a test set."""
    return {"sets": eval_sets("val", "hard"), "test_set": test_set()}


def run_whole(
    config: RecipeConfig,
    make_parts: Callable[[], Any] = all_sets,
    *,
    num_processes: int = 1,
) -> Any:
    """Run to the end without an interruption, and return what is left."""
    folder = folder_of(config)
    logs = folder.with_name(f"{folder.name}-logs")
    processes.run(attempt, config, None, make_parts, num_processes=num_processes, folder=logs)
    return left_by(folder)


def run_interrupted(
    config: RecipeConfig,
    interruption: Interruption,
    make_parts: Callable[[], Any] = all_sets,
    *,
    num_processes: int = 1,
) -> Any:
    """Interrupt the run, then start the same again to its end; return what is left."""
    folder = folder_of(config)
    logs = folder.with_name(f"{folder.name}-interrupted-logs")
    job = processes.start(
        attempt, config, interruption, make_parts, num_processes=num_processes, folder=logs
    )
    is_killed = interruption.signal == "KILL"
    codes = job.wait(30 if is_killed else 600)
    expected = -signal.SIGKILL if is_killed else 75
    assert codes[-1] == expected, f"{codes} {job.output(len(codes) - 1)}"
    return run_whole(config, make_parts, num_processes=num_processes)


def folder_of(config: RecipeConfig) -> Path:
    assert config.run.output_dir is not None
    return config.run.output_dir


def left_by(run: Path) -> Any:
    """Return what a run leaves, with its newest checkpoint and the best one only.

    A preemption adds a checkpoint, which takes the place of an older one.
    """
    files = left.left_by(run)
    newest = max(name.split("/")[1] for name in files if name.startswith("checkpoints/step-"))
    return {
        name: value
        for name, value in files.items()
        if not name.startswith("checkpoints/step-") or name.startswith(f"checkpoints/{newest}/")
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between two runs."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def rows_of(run: Path, event: str = "eval") -> list[dict[str, Any]]:
    """Return the rows of a run, without its speed."""
    return [row for row in left.left_by(run).get("metrics.jsonl", []) if row["event"] == event]


def steps_of(run: Path, event: str = "eval") -> list[int]:
    """Return the steps of the rows of a run."""
    return [row["optimizer_step"] for row in rows_of(run, event)]
