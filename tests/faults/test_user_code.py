"""What users bring fails, on one process of two as well: the job ends at once and names it."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunResult,
    TopKAccuracy,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.core.types import StepOutput
from tests import processes, workload
from tests.training.test_exactness import final_files
from tests.variants import slow

STEPS_PER_EPOCH = {1: 5, 2: 3}


class FailingUpdate(MeanLoss):
    """Fails on the last process alone."""

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            raise ZeroDivisionError("by zero")
        super().update(sums, batch, output)


class FailingLater(MeanLoss):
    """Fails on the last of two processes in the first evaluation, after the batch that tries it."""

    num_calls = 0

    def update(self, sums: Tensor, batch: Batch, output: StepOutput) -> None:
        self.num_calls += 1
        if self.num_calls > 1 and os.environ.get("RANK") == "1":
            raise ZeroDivisionError("by zero")
        super().update(sums, batch, output)


class FailingCompute(MeanLoss):
    """Fails on all, as their sums are the same."""

    def compute(self, sums: Tensor) -> dict[str, Any]:
        raise ZeroDivisionError("by zero")


def train(folder: Path, metric: type[MeanLoss] = MeanLoss) -> None:
    workload.MeanLoss = metric  # type: ignore[misc]
    config = workload.make_config(folder, checkpoint=workload.CheckpointConfig())
    main(lambda _: workload.train(config, dropout=0.1), RecipeConfig, description="", argv=[])


@pytest.mark.parametrize(
    ("metric", "num_processes"),
    [
        (FailingUpdate, 2),
        (FailingLater, 2),
        (FailingCompute, 1),
        *slow([(FailingUpdate, 1), (FailingCompute, 2)]),
    ],
)
def test_a_metric_that_fails_is_named_and_costs_no_step(
    tmp_path: Path, metric: type[MeanLoss], num_processes: int
) -> None:
    options: dict[str, Any] = {"num_processes": num_processes}
    job = processes.start(train, tmp_path / "run", metric, folder=tmp_path / "logs", **options)
    assert job.wait() == [80] * num_processes, job.output()
    # The trial is before the first step; `compute` may need more than a batch.
    is_tried = metric is FailingUpdate
    rank = 0 if metric is FailingCompute else num_processes - 1
    step = 0 if is_tried else STEPS_PER_EPOCH[num_processes]
    assert (
        f"rank {rank}, step {step}, evaluation: "
        f"metric {metric.__name__} failed (ZeroDivisionError: by zero)"
    ) in job.output().splitlines()[-1]
    frames = [line for line in job.output(rank).splitlines() if line.startswith('  File "')]
    assert len(frames) == 1, "the traceback of the metric alone"
    assert frames[0].endswith(("in update", "in compute"))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    last = None if is_tried else f"step-{step:010d}-epoch-00000"
    assert status["last_commit"] == last, "no checkpoint was due before the evaluation"

    processes.run(train, tmp_path / "run", folder=tmp_path / "mended", **options)
    processes.run(train, tmp_path / "whole", folder=tmp_path / "whole-logs", **options)
    assert final_files(tmp_path / "run") == final_files(tmp_path / "whole")


class PerPixel(ClassificationTask):
    """Takes an image's label for each pixel: its own loss can do so, a stock metric cannot."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        scores = model(batch.inputs)
        labels = batch.targets[:, None, None].expand(-1, *scores.shape[2:])
        losses = F.cross_entropy(scores, labels, reduction="none")
        return StepOutput(losses.mean((1, 2)), scores)

    eval_step = step


def train_on_pixels(folder: Path, task: type[ClassificationTask]) -> None:
    """Train a net with logits per pixel, on labels per pixel unless the task makes them."""

    def train(config: RecipeConfig) -> RunResult:
        with start_run(workload.make_config(folder), recipe="pixels") as run:
            images = workload.make_images(48)
            labels = images.train.labels
            if task is ClassificationTask:
                labels = labels[:, None, None].expand(-1, 8, 8)
            data = TensorDataset(images.train.images / 255, labels)
            return build_trainer(
                run,
                model=nn.Conv2d(3, 4, 1),
                task=task(),
                train_set=data,
                eval_sets=data,
                metrics=[MeanLoss(), TopKAccuracy()],
            ).fit()

    main(train, RecipeConfig, description="", argv=[])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            ClassificationTask,
            "the model returns float32 [10, 4, 8, 8] for targets int64 [10, 8, 8]: a classifier",
        ),
        (
            PerPixel,
            "metric TopKAccuracy: the model returns float32 [10, 4, 8, 8]"
            " for targets int64 [10]: a classifier",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_one_line_and_cost_no_step(
    tmp_path: Path, task: type[ClassificationTask], said: str
) -> None:
    """Fault (Data, config and users' code): model, labels and metrics do not match -> exit 64 at
    the first batch, with both shapes and the fix
    """
    job = processes.run(
        train_on_pixels, tmp_path / "run", task, folder=tmp_path / "logs", codes=[64]
    )
    assert job.output().splitlines()[-1].startswith(f"accel_trainer: error[SHAPES]: {said}")
    assert "Traceback" not in job.output()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


class Unreadable(workload.Bars):
    """Samples of which one process cannot read one any more once it trains."""

    def __init__(self, split: Any, rank: int) -> None:
        super().__init__(split)
        self._rank = rank
        self._num_read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._num_read += 1
        if self._num_read == 75 and os.environ["RANK"] == str(self._rank):
            raise OSError("cut\nshort")
        return super().__getitem__(index)


def train_on_unreadable(folder: Path, rank: int, num_workers: int) -> None:
    # The data workers fork, or each would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    workload.Bars = lambda split: Unreadable(split, rank)  # type: ignore[assignment, misc]
    config = workload.make_config(folder)
    main(
        lambda _: workload.train(config, num_workers=num_workers),
        RecipeConfig,
        description="",
        argv=[],
    )


@pytest.mark.parametrize(("rank", "num_workers"), [(0, 0), (1, 0), (1, 1)])
def test_a_bad_sample_of_one_process_ends_both_and_is_named(
    tmp_path: Path, rank: int, num_workers: int
) -> None:
    arguments = (tmp_path / "run", rank, num_workers)
    job = processes.run(
        train_on_unreadable, *arguments, folder=tmp_path / "logs", has_workers=True, codes=[65, 65]
    )
    said = job.output().splitlines()[-1]
    assert "cannot be read (OSError: cut short, at tests/faults/test_user_code.py:" in said
    assert "in __getitem__): fix it" in said
    assert said.startswith(
        "accel_trainer: error[DATA_SAMPLE]: sample "
        if rank == 0
        else "accel_trainer: error[PROCESS]: rank 1, step 1, training: sample "
    )
    assert "Traceback" not in job.output(), "no bug"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 65)
