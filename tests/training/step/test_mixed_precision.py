"""Reduced precision: bfloat16, and loss scaling with its skipped steps."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import (
    Batch,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    RunResult,
    RuntimeConfig,
    StepOutput,
    StepReport,
    Trainer,
    TrainerConfig,
)

from ... import processes, workload
from ...joined import FSDP


class OverflowingTask(ClassificationTask):
    """Overflows the gradient in optimizer steps 2 and 4, as float16 does when it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_step = 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        if self.optimizer_step in (1, 3):
            output.losses.register_hook(lambda gradient: gradient * float("inf"))
        return output


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


class Watcher(Callback):
    """Tells the task which step is next; keeps reports, weights and the average after each."""

    def __init__(self, task: OverflowingTask) -> None:
        self.task = task
        self.reports: list[StepReport] = []
        self.weights: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.task.optimizer_step = trainer.state.optimizer_step

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.task.optimizer_step = report.optimizer_step
        self.reports.append(report)
        self.weights.append(flat(trainer.model))
        assert trainer.average_model is not None
        self.averages.append(flat(trainer.average_model))


def run(folder: Path, *, max_steps: int | None = None, watcher: Watcher | None = None) -> RunResult:
    config = workload.make_config(folder, checkpoint=CheckpointConfig())
    # accelerate unscales before clipping only under its own float16, which the CPU does not have.
    trainer = replace(config.trainer, max_grad_norm=None, max_steps=max_steps, log_every_n_steps=1)
    watcher = watcher or Watcher(OverflowingTask())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return workload.train(
        replace(config, trainer=trainer), task=watcher.task, scaler=scaler, callbacks=(watcher,)
    )


def test_an_overflow_skips_the_update_and_average_and_halves_the_scale(tmp_path: Path) -> None:
    watcher = Watcher(OverflowingTask())
    run(tmp_path, watcher=watcher)
    assert [r.optimizer_step for r in watcher.reports if r.was_skipped] == [2, 4]
    for step in (1, 3):
        assert torch.equal(watcher.weights[step], watcher.weights[step - 1])
        assert torch.equal(watcher.averages[step], watcher.averages[step - 1])
    assert not torch.equal(watcher.weights[2], watcher.weights[1])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scales = [row["optim/loss_scale"] for row in rows if row["event"] == "train"]
    assert scales[:5] == [1024.0, 512.0, 512.0, 256.0, 256.0]
    assert [row["optimizer_step"] for row in rows if "optim/skipped_steps" in row] == [2, 4]


def test_the_loss_scale_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    for max_steps in (2, 4, None):
        run(tmp_path / "parts", max_steps=max_steps)
    exports = [
        (tmp_path / name / "export" / "model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert exports[0] == exports[1]


class AsInFloat16(Callback):
    """Lets accelerate unscale before clipping, as in float16; the forward stays in float32."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.autocast = nullcontext


def test_gradients_are_clipped_without_their_scale(tmp_path: Path) -> None:
    """A power of two scales exactly, so that nothing may differ."""
    for name, scaler, callbacks in (
        ("float32", None, ()),
        ("scaled", torch.amp.GradScaler("cpu", init_scale=2.0**12), (AsInFloat16(),)),
    ):
        config = workload.make_config(tmp_path / name)
        trainer = replace(
            config.trainer, max_grad_norm=0.05, log_every_n_steps=1, evaluate_every="9epochs"
        )
        workload.train(replace(config, trainer=trainer), scaler=scaler, callbacks=callbacks)
    folders = [tmp_path / name for name in ("float32", "scaled")]
    norms = [[row["optim/grad_norm"] for row in rows(folder)] for folder in folders]
    assert min(norms[0]) > 0.05, "all are clipped"
    assert norms[0] == norms[1]
    weights = [max(folder.glob("checkpoints/step-*")) / "model.safetensors" for folder in folders]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == "train"]


class Dtypes(Callback):
    """Records the dtypes of the first convolution's output and weights and of the net's output."""

    def __init__(self) -> None:
        self.seen: set[tuple[bool, torch.dtype, torch.dtype]] = set()
        self.returned: set[torch.dtype] = set()

    def on_fit_start(self, trainer: Trainer) -> None:
        def look(layer: nn.Conv2d, inputs: object, output: torch.Tensor) -> None:
            self.seen.add((layer.training, output.dtype, layer.weight.dtype))

        trainer.model.layers[0].register_forward_hook(look)
        trainer.model.register_forward_hook(
            lambda net, inputs, output: self.returned.add(output.dtype)
        )


@pytest.mark.parametrize(("num_processes", "shards"), [(1, False), (2, False), (2, True)])
def test_bfloat16_is_what_layers_compute_in_and_not_what_weights_are(
    tmp_path: Path, num_processes: int, shards: bool
) -> None:
    processes.run(
        check_dtypes,
        tmp_path / "run",
        shards,
        num_processes=num_processes,
        folder=tmp_path / "logs",
    )


def check_dtypes(folder: Path, shards: bool) -> None:
    os.environ.update(FSDP if shards else {})
    looking = Dtypes()
    config = workload.make_config(
        folder, runtime=RuntimeConfig(num_threads=1, mixed_precision="bf16")
    )
    workload.train(replace(config, trainer=TrainerConfig(num_epochs=1)), callbacks=(looking,))
    assert looking.seen == {(training, torch.bfloat16, torch.float32) for training in (True, False)}
    assert looking.returned == {torch.float32}


class DistanceTask(ClassificationTask):
    """Computes something of its own beside the model, and notes in which precision."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, torch.dtype] = {}

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.dtypes["training"] = (batch.inputs @ batch.inputs.mT).dtype
        return super().step(model, batch)

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.dtypes["evaluation"] = (batch.inputs @ batch.inputs.mT).dtype
        return super().eval_step(model, batch)


def test_a_task_computes_in_one_precision_in_training_and_evaluation(tmp_path: Path) -> None:
    task = DistanceTask()
    config = workload.make_config(
        tmp_path, runtime=RuntimeConfig(num_threads=1, mixed_precision="bf16")
    )
    workload.train(replace(config, trainer=TrainerConfig(num_epochs=1)), task=task)
    assert task.dtypes == {"training": torch.bfloat16, "evaluation": torch.bfloat16}
