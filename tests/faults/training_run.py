"""Tiny runs of the settings of training: orders, evaluations, tasks, and what callbacks note.

`CASES` combines them, each on 1 and on 2 processes; `changing_kills` interrupts the runs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationConfig,
    ClassificationTask,
    ConfusionMatrix,
    DatasetOptions,
    MeanLoss,
    MeanNumber,
    OptimizerConfig,
    RecipeConfig,
    Run,
    RunConfig,
    RunResult,
    RuntimeConfig,
    StepOutput,
    StepReport,
    TopKAccuracy,
    Trainer,
    TrainerConfig,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.callbacks.result import ResultWriter
from accel_trainer.checkpoint import manager
from accel_trainer.core import filesystem
from accel_trainer.core.shards import is_shard
from accel_trainer.run import build
from accel_trainer.training.evaluation.evaluator import Evaluator
from accel_trainer.training.log import Log
from accel_trainer.vision import to_png
from tests.checkpoint.sharded_run import KINDS
from tests.faults.crash import WHENS, leftovers, outcome
from tests.faults.disks import KillingDisk, When, installed
from tests.programs.faults import act_in_call
from tests.training.tasks.test_pairs import SimClr
from tests.variants import NUM_THREADS

NUM_CLASSES = 3
NUM_TRAIN = 38
LEFT_OUT = "0\n7  # a comment\n30\n"
NUM_INTERRUPTIONS = 3  # of a run
MAX_DELAY_S = 0.04

# --- data, models and tasks ---


class Points:
    """Points around the corner of their class, of which the last has most samples."""

    def __init__(self, size: int, *, seed: int, num_views: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = (torch.arange(size) % 7).clamp_max(NUM_CLASSES - 1)
        self.points = seed * torch.randn(size, 6, generator=generator)
        self.points[torch.arange(size), self.labels] += 1.5
        self._shape = (6,) if num_views is None else (num_views, 6)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a point, or several views of it, with noise that is drawn at each reading."""
        return self.points[index] + 0.3 * torch.randn(self._shape), self.labels[index]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, NUM_CLASSES))


class Curriculum:
    """Smooths the labels less and less, and reports numbers of its own."""

    metrics = (MeanLoss(), MeanNumber("accuracy", higher_is_better=True))

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        position = batch.position
        smoothing = 0.3 * (1 - position.progress) + 0.1 * (position.epoch % 2)
        losses = F.cross_entropy(
            logits, batch.targets, reduction="none", label_smoothing=smoothing
        ) * (1 + 0.01 * position.step)
        numbers = {
            "accuracy": (logits.argmax(1) == batch.targets).double(),
            "smoothing": torch.full((len(batch),), smoothing),
        }
        return StepOutput(losses, logits, numbers=numbers)


class Items:
    """Has only the mean over items, of which a sample has as many as its class says."""

    metrics = (MeanLoss(),)

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        num_items = batch.targets + 1
        losses = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        mean = (losses * num_items).sum() / num_items.sum()
        return StepOutput.from_mean(mean, num_items=num_items.sum())


def make_task(name: str, run: Run) -> Any:
    if name == "pairs":
        return SimClr(run.accelerator)
    if name == "classes":
        return ClassificationTask(
            ClassificationConfig(label_smoothing=0.1, class_weights="balanced"),
            class_counts=torch.bincount(Points(NUM_TRAIN, seed=1).labels),
        )
    return {"position": Curriculum, "items": Items}[name]()


class Notes(Callback):
    """Logs, draws, asks for saves and changes the metadata, on each process to something else."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._num_evaluations = 0

    def _weights(self) -> Tensor:
        """Return the weights [16, 6]. **Collective** if they are shards."""
        weight = self._layer.weight.detach()
        return weight.full_tensor() if is_shard(weight) else weight

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        step = report.optimizer_step
        is_main = trainer.accelerator.is_main_process
        trainer.log("loss", report.loss_sum if is_main else 1e9)
        trainer.log("mine/step", step if step % 5 else math.inf)
        if step % 2:
            trainer.log.histogram("weights", self._weights())
        if step % 3 == 0:
            trainer.log.picture("mine/weights", to_png(self._weights().sigmoid()[None]))
        if step % 4 == 1 and trainer.accelerator.is_last_process:
            trainer.request_save()
        trainer.metadata["steps"].append(step)
        if step % 2:
            trainer.metadata["process"] = trainer.accelerator.process_index
        else:
            trainer.metadata.pop("process", None)

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._num_evaluations += 1
        trainer.log("evaluations", self._num_evaluations)
        trainer.log.picture("evaluated", to_png(self._weights().tanh().abs()[None]))
        trainer.metadata[f"evaluation {self._num_evaluations}"] = trainer.state.optimizer_step

    def state_dict(self) -> dict[str, int]:
        return {"num_evaluations": self._num_evaluations}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._num_evaluations = state["num_evaluations"]


# --- interruptions ---

MOMENTS: dict[str, tuple[Any, str]] = {
    "start": (sys.modules[__name__], "make_net"),
    "step": (Trainer, "train_step"),
    "evaluation": (Evaluator, "run"),
    "picture": (Log, "picture"),
    "save": (manager, "write_checkpoint"),
    "test": (build, "load_best_weights"),
    "end": (ResultWriter, "on_fit_end"),
}
# In a third of a run, about: later attempts, which begin after a checkpoint, then get to its end.
NUM_CALLS = {"start": 1, "step": 5, "evaluation": 4, "picture": 3, "save": 3, "disk": 200}
AT_THE_END = ("test", "end")
OF_MAIN = ("save", "end", "disk")
SIGNALS = [("KILL",), ("KILL",), ("USR2", "KILL"), ("TERM", "KILL"), ("USR2", "TERM"), ("TERM",)]


@dataclass(frozen=True)
class Interruption:
    """Signals to a rank, one after the other, each after a delay.

    The first delay begins before the call of that number that `moment` names. On the `disk`, it is
    a SIGKILL at the change of that number.
    """

    moment: str
    number: int
    signals: tuple[str, ...]
    delays_s: tuple[float, ...]
    when: When
    rank: int

    def send(self) -> None:
        for name, delay_s in zip(self.signals, self.delays_s, strict=True):
            time.sleep(delay_s)
            number = getattr(signal, f"SIG{name}")
            # After the run, while its data workers end, the process has its own handlers again.
            if name == "KILL" or signal.getsignal(number) is not signal.SIG_DFL:
                os.kill(os.getpid(), number)


def draw_interruption(draw: random.Random, num_processes: int, *, is_last: bool) -> Interruption:
    """Return an interruption; the last one of a run may be at its end."""
    moment = draw.choice([*NUM_CALLS, "step", "disk", *AT_THE_END * is_last])
    signals = ("KILL",) if moment == "disk" else draw.choice(SIGNALS)
    return Interruption(
        moment,
        draw.randint(1, NUM_CALLS.get(moment, 1)),
        signals,
        tuple(draw.uniform(0, MAX_DELAY_S) for _ in signals),
        draw.choice(WHENS),
        0 if moment in OF_MAIN else draw.randrange(num_processes),
    )


# --- the runs ---


@dataclass(frozen=True)
class TrainingCase:
    """A kind of run. `num_processes` are those of its attempts, by turns."""

    task: str
    order: str
    evaluate_every: str
    num_processes: tuple[int, ...] = (1,)
    num_workers: int = 0
    reduce: Any = "float"
    ema_decay: float | None = None
    patience: int | None = None
    max_steps: int | None = None
    shards: str = "whole"

    def draw(self, draw: random.Random, attempt: int) -> Interruption:
        """Return the interruption of an attempt."""
        num_processes = self.num_processes[attempt % len(self.num_processes)]
        return draw_interruption(draw, num_processes, is_last=attempt == NUM_INTERRUPTIONS - 1)

    def train(self, folder: Path, interruption: Interruption | None) -> None:
        """Train in this process of a launch, perhaps interrupted; exit as a recipe does."""
        for name in ("TERM", "USR2"):  # a background job may ignore some
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
        # A server of its own for each process's workers would take seconds.
        multiprocessing.set_start_method("fork", force=True)
        os.environ.update(KINDS[self.shards])
        filesystem.write_file_atomic(folder.parent / "left-out.txt", LEFT_OUT.encode())
        disk: Any = nullcontext()
        if interruption is not None and interruption.rank == int(os.environ.get("RANK", 0)):
            if interruption.moment == "disk":
                disk = installed(KillingDisk(interruption.number, interruption.when))
            else:
                sender = threading.Thread(target=interruption.send, daemon=True)
                act_in_call(*MOMENTS[interruption.moment], interruption.number, sender.start)
        with disk:
            main(lambda _: self._fit(folder), RecipeConfig, description="", argv=[])

    def _config(self, folder: Path) -> RecipeConfig:
        batch = BatchConfig(
            per_device_batch_size={"pairs": 8}.get(self.task, 2 if self.reduce == "exact" else 4),
            global_batch_size=8,
            eval_batch_size=3,
            order="uniform" if self.order == "weighted" else self.order,  # type: ignore[arg-type]
            leave_out=folder.parent / "left-out.txt",
            drop_last=self.order == "stored",
            num_workers=self.num_workers,
            reduce=self.reduce,
        )
        trainer = TrainerConfig(
            num_epochs=3,
            evaluate_every=self.evaluate_every,
            log_every_n_steps=4,
            max_grad_norm=1.0,
            ema_decay=self.ema_decay,
            patience=self.patience,
            max_steps=self.max_steps,
        )
        return RecipeConfig(
            seed=3,
            batch=batch,
            trainer=trainer,
            optimizer=OptimizerConfig(name="adamw", learning_rate=0.02),
            checkpoint=CheckpointConfig(every_n_steps=6),
            runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
            run=RunConfig(output_dir=folder, quiet=True),
        )

    def _fit(self, folder: Path) -> RunResult:
        num_views = 2 if self.task == "pairs" else None
        is_weighted = self.order == "weighted"
        sets = {
            name: Points(size, seed=seed, num_views=num_views)
            for seed, (name, size) in enumerate({"val": 13, "hard": 7, "test": 9}.items(), start=1)
        }
        metrics = {
            "classes": {
                "val": [MeanLoss(), TopKAccuracy(), ConfusionMatrix(NUM_CLASSES)],
                "hard": [MeanLoss()],
            }
        }
        with start_run(self._config(folder), recipe="training") as run:
            net = make_net()
            trainer = build_trainer(
                run,
                model=net,
                task=make_task(self.task, run),
                train_set=Points(NUM_TRAIN, seed=1, num_views=num_views),
                test_set=sets.pop("test"),
                eval_sets=sets,
                metrics=metrics.get(self.task),
                options=DatasetOptions(
                    weights=torch.arange(NUM_TRAIN) % 5 if is_weighted else None
                ),
                callbacks=[Notes(net[0])],
                metadata={"given": {"version": 3}, "steps": []},
            )
            return trainer.fit()

    def left_by(self, folder: Path) -> dict[str, Any]:
        """Return what a run leaves, by name, without times.

        Of the checkpoints, only the newest, and the weights of the best: preemptions add others.
        """
        files = outcome(folder)
        checkpoints = folder / "checkpoints"
        newest = max(checkpoints.glob("step-*"))
        best = files["result.json"]["best"]["name"]
        left = {
            name: value
            for name, value in files.items()
            if not name.startswith("checkpoints/step-")
            or name.startswith(f"checkpoints/{newest.name}/")
            or (name.startswith(f"checkpoints/{best}/") and name.endswith(".safetensors"))
        }
        left["metadata"] = json.loads((newest / "manifest.json").read_text())["metadata"]
        left["leftovers"] = leftovers(folder)
        for path in (*folder.glob("pictures/*"), *folder.glob("evaluation.safetensors")):
            left[str(path.relative_to(folder))] = path.read_bytes()
        return left


COMBINATIONS = [
    TrainingCase("classes", "balanced", "3steps", ema_decay=0.9),
    TrainingCase("items", "weighted", "4steps", ema_decay=0.9),
    TrainingCase("position", "stored", "2steps", patience=2),
    TrainingCase("pairs", "uniform", "3steps", ema_decay=0.9),
    TrainingCase("position", "balanced", "8steps", num_workers=2),
    TrainingCase("classes", "weighted", "0.5epochs", patience=3),
    TrainingCase("items", "stored", "2epochs", max_steps=11),
    TrainingCase("pairs", "weighted", "8steps", num_workers=2),
]
CASES = [
    *(replace(case, num_processes=(2,)) for case in COMBINATIONS),
    *(
        replace(case, num_processes=((1, 2), (2, 1))[index % 2], reduce="exact")
        for index, case in enumerate(COMBINATIONS)
        if case.task != "pairs"  # which one micro-batch must have on each process
    ),
    *COMBINATIONS,
    *(
        replace(case, num_processes=(2,), shards=("sharded", "gathered")[index % 2])
        for index, case in enumerate(COMBINATIONS[:4])
    ),
]
