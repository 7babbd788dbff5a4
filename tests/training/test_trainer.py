"""How a run goes and ends: stops, evaluations, the best, and what observers see."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    Batch,
    Callback,
    CheckpointConfig,
    CheckpointError,
    ClassificationTask,
    ConfigError,
    OptimizerConfig,
    RunResult,
    ScheduleConfig,
    StepOutput,
    StepReport,
    Trainer,
    TrainerConfig,
)
from accel_trainer.core.types import StepBatch

from .. import workload
from . import planted


def run(folder: Path, *callbacks: Callback, dropout: float = 0.0, **changes: Any) -> RunResult:
    config = workload.make_config(folder, checkpoint=CheckpointConfig())
    config = replace(config, trainer=replace(config.trainer, **changes))
    return workload.train(config, callbacks=callbacks, dropout=dropout)


class Recorder(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.reports: list[StepReport] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.events.append("fit_start")

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.events.append(f"step {report.optimizer_step}")
        self.reports.append(report)

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.events.append("evaluate")

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.events.append(f"epoch {trainer.state.epoch}")

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        self.events.append(name)

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        self.events.append("fit_end")

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.events.append(type(error).__name__)


class StopAt(Callback):
    """Asks for a stop after a step."""

    def __init__(self, optimizer_step: int) -> None:
        self.optimizer_step = optimizer_step

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self.optimizer_step:
            trainer.request_stop("enough")


def test_a_stop_that_a_callback_requests_is_at_that_step_and_permanent(tmp_path: Path) -> None:
    for _ in range(2):  # the same command again finds a finished run
        result = run(tmp_path, StopAt(2), num_epochs=3)
        assert (result.state, result.stop_reason, result.position.optimizer_step) == (
            "done",
            "enough",
            2,
        )
        assert "eval/accuracy" in result.metrics


def test_observers_see_the_moments_of_a_run_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    config = workload.make_config(tmp_path)
    config = replace(
        config,
        trainer=replace(config.trainer, num_epochs=1),
        checkpoint=replace(config.checkpoint, every_n_steps=2),
    )
    workload.train(config, num_train=48, callbacks=(recorder,))
    assert recorder.events == [
        "fit_start",
        "step 1",
        "step 2",
        "step-0000000002-epoch-00000",
        "step 3",
        "evaluate",
        "epoch 1",
        "step-0000000003-epoch-00001",
        "fit_end",
    ]


class Broken(Callback):
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_calls = 0

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.num_calls += 1
        raise self.error


def test_a_callback_that_fails_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Fault (Data, config and users' code): a callback or a metric raises -> the run ends on all
    processes with exit code 80 and the name of the callback or metric. If a metric raises, the
    state is saved first: after a fix, the same command continues without losing a step
    """
    broken = Broken(ZeroDivisionError("by zero"))
    recorder = Recorder()
    with pytest.raises(Exception, match=r"callback Broken.on_step_end failed \(ZeroDivisionError"):
        run(tmp_path, recorder, broken)
    assert recorder.events[-2:] == ["step 1", "PartFailed"]


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        OptimizerConfig(momentum=0.0),
        OptimizerConfig(name="adamw"),
        OptimizerConfig(name="muon"),
    ],
    ids=["momentum", "no momentum", "adamw", "muon"],
)
def test_the_room_that_the_first_step_requires_is_what_a_checkpoint_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: OptimizerConfig
) -> None:
    """Fault (Disk): no room for two checkpoints (for one more, on a resume) -> exit 74 before the
    first step; the error lists the bytes that are needed, including the optimizer's future state
    and frozen parameters once, and those that are free
    """
    config = workload.make_config(tmp_path / "run", optimizer=optimizer)
    config = replace(config, trainer=replace(config.trainer, max_steps=1))
    with monkeypatch.context() as full:
        free = iter([2**40])  # before the first step
        full.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: next(free, 0))
        with pytest.raises(CheckpointError) as refused:
            workload.train(config)
    (found,) = re.findall(r"(\d+) more checkpoints? must fit \(([\d,]+) bytes", str(refused.value))
    count, needed = (int(number.replace(",", "")) for number in found)
    workload.train(config)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    taken = [
        tensor.nbytes
        for path in newest.glob("*.safetensors")
        for tensor in load_file(path).values()
    ]
    assert needed == count * sum(taken)


def test_patience_counts_across_restarts(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_epochs": 50,
        "monitor": "eval/loss",
        "monitor_mode": "max",
        "patience": 2,
    }
    whole = run(tmp_path / "whole", **options)
    for max_steps in range(2, whole.position.optimizer_step, 3):  # an epoch has five steps
        run(tmp_path / "broken", max_steps=max_steps, **options)
    assert run(tmp_path / "broken", **options).position == whole.position


def test_each_row_of_training_says_how_long_it_waited_for_data(tmp_path: Path) -> None:
    workload.train(workload.make_config(tmp_path), num_workers=0)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["perf/data_wait_fraction"] < 1 for row in rows if row["event"] == "train")


def test_without_clipping_no_norm_is_computed(tmp_path: Path) -> None:
    recorder = Recorder()
    run(tmp_path, recorder, max_grad_norm=None)
    assert all(report.grad_norm is None for report in recorder.reports)
    assert "optim/grad_norm" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_logged_norm_is_the_one_before_clipping(tmp_path: Path) -> None:
    loose, tight = Recorder(), Recorder()
    run(tmp_path / "loose", loose, max_grad_norm=1e6, max_steps=1)
    run(tmp_path / "tight", tight, max_grad_norm=1e-3, max_steps=1)
    norms = [recorder.reports[0].grad_norm for recorder in (loose, tight)]
    assert norms[0] is not None
    assert norms[1] is not None
    assert torch.equal(norms[0], norms[1])


class Steps(ClassificationTask, Callback):
    """Keeps the weights before and after each step, of one micro-batch, and what it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.weights: list[dict[str, Tensor]] = []

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        return super().step(model, batch)

    def on_fit_start(self, trainer: Trainer) -> None:
        self.weights.append(
            {name: value.clone() for name, value in trainer.model.state_dict().items()}
        )

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.on_fit_start(trainer)


def test_a_step_short_or_not_goes_down_the_mean_loss_of_its_samples(tmp_path: Path) -> None:
    steps = Steps()
    config = workload.make_config(
        tmp_path,
        optimizer=OptimizerConfig(
            learning_rate=0.1, momentum=0.0, nesterov=False, weight_decay=0.0
        ),
        schedule=ScheduleConfig(shape="constant"),
        trainer=TrainerConfig(num_epochs=1),
    )
    workload.train(config, num_train=20, task=steps, callbacks=(steps,))
    assert [len(batch) for batch in steps.batches] == [16, 4]
    for batch, before, after in zip(
        steps.batches, steps.weights[:-1], steps.weights[1:], strict=True
    ):
        net = workload.SmallNet(norm="group")
        net.load_state_dict(before)
        F.cross_entropy(net(batch.inputs), batch.targets).backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(after[name], before[name] - 0.1 * parameter.grad)


def test_exported_weights_load_into_the_plain_model(tmp_path: Path) -> None:
    run(tmp_path)
    model = workload.SmallNet(norm="group")
    model.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["weights"].startswith("ema of the best checkpoint")


class Twice(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        super().train_step(step_batch)
        return super().train_step(step_batch)


class Never(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        return StepReport(1, 0, 0.1, torch.zeros(()), {}, 4, None, False)


@pytest.mark.parametrize(("trainer_class", "number"), [(Twice, 2), (Never, 0)])
def test_a_step_batch_that_is_not_one_update_ends_the_run_at_the_first(
    tmp_path: Path, trainer_class: type[Trainer], number: int
) -> None:
    steps = Recorder()
    with pytest.raises(ConfigError, match=f"{number} steps for a step batch.*compute_gradients"):
        planted.train(
            planted.make_config(tmp_path), trainer_class=trainer_class, callbacks=(steps,)
        )
    assert steps.reports == []
