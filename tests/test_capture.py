"""A recorded step leaves the same bits as the step it was recorded from, or is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import (
    BatchConfig,
    CheckpointConfig,
    DivergedError,
    OptimizerConfig,
    RuntimeConfig,
    StepReport,
    Trainer,
)
from accel_trainer.callbacks.base import Callback
from accel_trainer.capture import Record, StepCapture, obstacles_to_capture, record_cuda_graph
from accel_trainer.compilation import Stopwatch
from accel_trainer.seeding import epoch_permutation
from accel_trainer.tasks import ClassificationTask
from accel_trainer.types import Batch, StepOutput, Window

from . import tape, workload
from .test_exactness import final_files


class Capture(Callback):
    """Captures the steps of the trainer that it is given to, and counts those that were replayed."""

    is_essential = True

    def __init__(self, record: Record = tape.record) -> None:
        self._record, self.num_replayed, self.preparation = record, 0, Stopwatch()

    def on_fit_start(self, trainer: Trainer) -> None:
        capture = StepCapture(trainer, preparation=self.preparation, record=self._counting)
        trainer.compute = capture.compute

    def _counting(self, work: Callable[[], Any]) -> Any:
        replay, values = self._record(work)

        def count_and_replay() -> None:
            self.num_replayed += 1
            replay()

        return count_and_replay, values


def train(folder: Path, *callbacks: Callback, max_steps: int | None = None, **options: Any) -> None:
    config = workload.make_config(
        folder,
        batch=options.pop("batch", BatchConfig(per_device_batch_size=8, eval_batch_size=37)),
        optimizer=options.pop("optimizer", OptimizerConfig(learning_rate=0.05)),
        checkpoint=CheckpointConfig(every_n_steps=6),  # less often than a log line, which must not read a step twice
    )
    trainer = replace(config.trainer, max_steps=max_steps, **options.pop("trainer", {}))
    workload.train(replace(config, trainer=trainer), callbacks=callbacks, **options)


def unrecordable(work: Callable[[], Any]) -> Any:
    raise RuntimeError("no graph today\nat all")


class CountingTask(ClassificationTask):
    """Has a sum of its own to report."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        loss_sum, _ = super().train_step(model, batch)
        return StepOutput(loss_sum, {"sample_ids": batch.sample_ids.sum()})


OPTIMIZERS = [OptimizerConfig(name="sgd"), OptimizerConfig(name="adamw"), OptimizerConfig(name="muon")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_recorded_steps_train_the_same_weights(tmp_path: Path, optimizer: OptimizerConfig) -> None:
    """Warm-up and decay, mixup, dropout, clipping, an average, and a last window that is smaller."""
    options = {"num_train": 76, "norm": "batch", "dropout": 0.3, "optimizer": optimizer, "task": CountingTask()}
    capture = Capture()
    train(tmp_path / "as it comes", Capture(unrecordable), **options)
    train(tmp_path / "recorded", capture, **options)
    assert capture.num_replayed == 2 * 9 - 3, "all but three steps for warming up, and each epoch's last"
    assert capture.preparation.seconds > 0, "told apart from training"
    assert final_files(tmp_path / "recorded") == final_files(tmp_path / "as it comes")


def test_a_recorded_run_that_was_stopped_resumes_with_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "whole", Capture())
    for max_steps in (6, 14, None):
        train(tmp_path / "stopped", Capture(), max_steps=max_steps)
    assert final_files(tmp_path / "stopped") == final_files(tmp_path / "whole")


class Reads(Callback):
    """Lets the optimizer read a value on the host, after the backward."""

    is_essential = True

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(lambda *_: print(torch.ones(()).item()))


def test_what_cannot_be_recorded_is_taken_as_it_comes_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Capture()
    train(tmp_path / "reads", capture, Reads(), norm="batch")
    assert capture.num_replayed == 0
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == (
        "--capture: torch cannot record this step (RuntimeError: operation not permitted when stream is capturing), "
        "and so each step is taken as it comes"
    )
    train(tmp_path / "as it comes", Capture(unrecordable), norm="batch")
    assert final_files(tmp_path / "reads") == final_files(tmp_path / "as it comes")


def test_inputs_that_are_not_one_tensor_are_taken_as_they_come_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Pairs(Callback):
        """Hands out the inputs in a tuple."""

        is_essential = True

        def on_fit_start(self, trainer: Trainer) -> None:
            capture = trainer.compute

            def compute(window: Window) -> Any:
                (batch,) = window.micro_batches
                return capture(Window([replace(batch, inputs=(batch.inputs,))], window.num_items))

            trainer.compute = compute

    class FirstOfPair(ClassificationTask):
        def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            return super().train_step(model, replace(batch, inputs=batch.inputs[0]))

    capture = Capture()
    train(tmp_path / "pairs", capture, Pairs(), task=FirstOfPair())
    assert capture.num_replayed == 0
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("--capture: the inputs or targets of a batch are not one tensor, and so each step")


def test_a_step_that_the_host_has_a_part_in_is_not_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fades(ClassificationTask):
        """Its loss depends on a number that the host counts."""

        def __init__(self) -> None:
            super().__init__()
            self.num_steps = 0

        def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            if torch.utils._python_dispatch._get_current_dispatch_mode() is None:  # recording is no step
                self.num_steps += 1
            loss_sum, sums = super().train_step(model, batch)
            return StepOutput(loss_sum / self.num_steps, sums)

    capture = Capture()
    train(tmp_path / "fades", capture, task=Fades())
    assert capture.num_replayed == 1, "the trial"
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "a recorded step does not leave the bits of the step itself" in said
    train(tmp_path / "as it comes", Capture(unrecordable), task=Fades())
    assert final_files(tmp_path / "fades") == final_files(tmp_path / "as it comes")


class Change(Callback):
    """Changes the trainer after a step, always at the same one."""

    def __init__(self, after_step: int, change: Callable[[Trainer], None]) -> None:
        self._after_step, self._change = after_step, change

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self._after_step:
            self._change(trainer)


def freeze(trainer: Trainer) -> None:
    trainer.raw_model.layers[0].weight.requires_grad_(False)  # type: ignore[union-attr, index]


def decay_less(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] /= 2


def stop_a_norm(trainer: Trainer) -> None:
    """The next epoch starts it again."""
    trainer.raw_model.layers[1].eval()  # type: ignore[union-attr, index]


@pytest.mark.parametrize("change", [freeze, decay_less, stop_a_norm])
def test_a_change_of_what_is_trained_or_how_is_recorded_anew(tmp_path: Path, change: Callable[[Trainer], None]) -> None:
    capture = Capture()
    train(tmp_path / "recorded", capture, Change(5, change), norm="batch")
    assert capture.num_replayed in (2 * 9 - 2 * 3, 2 * 9 - 3 * 3), "each way of training is recorded after three steps"
    train(tmp_path / "as it comes", Capture(unrecordable), Change(5, change), norm="batch")
    assert final_files(tmp_path / "recorded") == final_files(tmp_path / "as it comes")


@pytest.mark.parametrize("max_grad_norm", [None, 5.0])
def test_a_replayed_gradient_that_is_not_finite_is_not_applied_and_ends_the_run(
    tmp_path: Path, max_grad_norm: float | None
) -> None:
    bad = int(epoch_permutation(72, seed=3, epoch=0)[6 * 8])
    weights: list[dict[str, Tensor]] = []

    class KeepWeights(Callback):
        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            weights.append({name: value.clone() for name, value in trainer.raw_model.state_dict().items()})

    class Breaks(ClassificationTask):
        """Its loss is NaN for one sample."""

        def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            loss_sum, sums = super().train_step(model, batch)
            return StepOutput(loss_sum * torch.where(batch.sample_ids == bad, torch.nan, 1.0).prod(), sums)

    trainer = {"max_grad_norm": max_grad_norm, "ema_decay": None}
    with pytest.raises(DivergedError, match=rf"step 7, epoch 1: the gradient is NaN or inf.*sample ids {bad},"):
        train(tmp_path / "run", Capture(), KeepWeights(), task=Breaks(), trainer=trainer)
    assert len(weights) == 7, "told by the step after it"
    assert all(torch.equal(weights[6][name], value) for name, value in weights[5].items()), "left out by the kernel"


class Obstacles(Callback):
    """Notes what would keep the steps of its trainer from being recorded."""

    found: list[str]

    def on_fit_start(self, trainer: Trainer) -> None:
        self.found = obstacles_to_capture(trainer)


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}, "needs --mixed-precision bf16 or no"),
        ({"trainer": {"on_nonfinite": "skip"}}, "needs --on-nonfinite stop"),
        ({"batch": BatchConfig(per_device_batch_size=4, accumulation_steps=2)}, "needs a step without --accumulate"),
        ({}, None),
    ],
)
def test_what_is_in_the_way_of_recording_is_known_before_the_first_step(
    tmp_path: Path, options: dict[str, Any], obstacle: str | None
) -> None:
    noted = Obstacles()
    train(tmp_path, noted, max_steps=1, **options)
    everywhere = {"needs a CUDA GPU", "needs deterministic kernels"}  # of this machine; the second is set for a GPU
    assert set(noted.found) - everywhere == ({obstacle} if obstacle else set())


def test_without_a_gpu_the_command_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = workload.make_config(tmp_path / "asked", runtime=RuntimeConfig(num_threads=1, capture=True))
    assert workload.train(config).state == "done"
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == "--capture needs a CUDA GPU, and so each step is taken as it comes"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_trains_the_same_weights(tmp_path: Path) -> None:
    capture = Capture(record_cuda_graph)
    train(tmp_path / "recorded", capture, norm="batch", dropout=0.3)
    train(tmp_path / "as it comes", Capture(unrecordable), norm="batch", dropout=0.3)
    assert capture.num_replayed == 2 * 9 - 3
    assert final_files(tmp_path / "recorded") == final_files(tmp_path / "as it comes")
