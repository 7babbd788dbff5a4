"""A loss over pairs of samples trains the same model on any number of processes, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ConfigError,
    StepOutput,
    build_trainer,
    gather_with_gradient,
    start_run,
)

from ... import processes, workload
from ..test_exactness import history, largest_difference

NUM_TRAIN = 35  # steps of 16, 16 and 3 samples: of four processes, the last one has none of the 3
NUM_EVAL = 21  # in batches of 10, one of two processes has an empty second batch


class SimClr:
    """NT-Xent: each view of a sample [b, 2, D] is to find the other among those of all samples."""

    couples_batch: Any = "gathered"
    unsaved_attributes = ("eval_sizes",)

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.eval_sizes: list[int] = []

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        mine = F.normalize(model(batch.inputs.flatten(0, 1)), dim=1)
        names = torch.stack([2 * batch.sample_ids, 2 * batch.sample_ids + 1], dim=1).flatten()
        everyone = gather_with_gradient(mine, self.accelerator)
        all_names = gather_with_gradient(names, self.accelerator)
        similarities = mine @ everyone.T / 0.2
        similarities = similarities.masked_fill(names[:, None] == all_names, -torch.inf)
        others = ((names ^ 1)[:, None] == all_names).int().argmax(1)
        losses = F.cross_entropy(similarities, others, reduction="none")
        return StepOutput((losses[0::2] + losses[1::2]) / 2)

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.eval_sizes.append(len(batch))
        mine = model(batch.inputs.flatten(0, 1))
        return StepOutput(1 - F.cosine_similarity(mine[0::2], mine[1::2]))


class Coupled(SimClr):
    couples_batch = True


def views(num_samples: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(num_samples)
    centers = torch.randn(num_samples, 1, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_samples, 2, 5, generator=generator, dtype=torch.float64)
    return TensorDataset((centers + 0.3 * noise).to(dtype), torch.zeros(num_samples))


def train(
    folder: Path,
    norm: str = "layer",
    kind: type[SimClr] = SimClr,
    batch: BatchConfig | None = None,
    callbacks: Sequence[Callback] = (),
    dtype: torch.dtype = torch.float64,
    onnx: bool = False,
) -> SimClr:
    batch = batch or BatchConfig(global_batch_size=16, per_device_batch_size=16, eval_batch_size=10)
    config = replace(workload.make_config(folder), batch=batch)
    config = replace(config, run=replace(config.run, onnx=onnx))
    with start_run(config, recipe="pairs") as run:
        task = kind(run.accelerator)
        build_trainer(
            run,
            model=nn.Sequential(
                nn.Linear(5, 8),
                nn.BatchNorm1d(8) if norm == "batch" else nn.LayerNorm(8),
                nn.Tanh(),
                nn.Linear(8, 4),
            ).to(dtype),
            task=task,
            train_set=views(NUM_TRAIN, dtype),
            eval_sets=views(NUM_EVAL, dtype),
            callbacks=callbacks,
        ).fit()
    return task


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_pairs_of_all_processes_train_the_model_of_one(
    tmp_path: Path, num_processes: int, norm: str
) -> None:
    for number in (1, num_processes):
        logs = tmp_path / f"logs-{number}"
        processes.run(train, tmp_path / f"on {number}", norm, num_processes=number, folder=logs)
    one, several = tmp_path / "on 1", tmp_path / f"on {num_processes}"
    assert largest_difference(one, several) <= 1e-12
    for mine, theirs in zip(history(one), history(several), strict=True):
        # The losses of a process and step are rounded to 36 bits, so that rows add them up exactly.
        for name, rounding in (("train/loss", 2**-35), ("eval/loss", 1e-12)):
            if name in mine:
                assert mine[name] == pytest.approx(theirs[name], rel=rounding), name


def check_eval_sizes(folder: Path) -> None:
    with pytest.raises(ConfigError, match="onnx= calls eval_step on the main process only"):
        train(folder.with_name("with onnx"), onnx=True)
    task = train(folder)
    last_size = 1 if task.accelerator.is_main_process else 0
    assert task.eval_sizes[-2:] == [10, last_size]


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
def test_all_processes_evaluate_a_gathering_task_equally_often(tmp_path: Path) -> None:
    processes.run(check_eval_sizes, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")


def check_refused(folder: Path, kind: type[SimClr], batch: BatchConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        train(folder, kind=kind, batch=batch)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("kind", "reduce", "num_processes", "said"),
    [
        (
            Coupled,
            "float",
            2,
            "Coupled .* has 2 processes x 1 micro-batch: .*, and gather_with",
        ),
        (Coupled, "exact", 1, "has 1 process x 2 micro-batches: set accumulate=1"),
        (SimClr, "exact", 1, "1 process x 2 micro-batches: set accumulate=1 batch_size=16$"),
    ],
)
def test_a_step_that_splits_pairs_is_refused_before_any_work(
    tmp_path: Path, kind: type[SimClr], reduce: Any, num_processes: int, said: str
) -> None:
    batch = BatchConfig(global_batch_size=16, per_device_batch_size=8, reduce=reduce)
    arguments = (tmp_path / "run", kind, batch, said)
    processes.run(check_refused, *arguments, num_processes=num_processes, folder=tmp_path / "logs")


def test_coupled_samples_train_on_one_process_in_one_micro_batch(tmp_path: Path) -> None:
    train(tmp_path / "coupled", kind=Coupled)
    train(tmp_path / "gathered")
    assert largest_difference(tmp_path / "coupled", tmp_path / "gathered") == 0
