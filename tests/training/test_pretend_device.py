"""A run on an accelerator: on one that pretends (`pretend.py`), and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate import PartialState
from torch.nn import functional as F

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    DivergedError,
    RunConfig,
    RuntimeConfig,
    StepReport,
    Trainer,
    TrainerConfig,
)
from accel_trainer.vision import AugmentConfig, ModelConfig
from recipes import cifar

from .. import processes, workload
from ..variants import slow
from .step import test_nonfinite_report
from .test_exactness import final_files, largest_difference

on_each_accelerator = pytest.mark.parametrize(
    "accelerator", ["pretend", pytest.param("gpu", marks=pytest.mark.gpu)]
)


class Waits(Callback):
    """Keeps what the host waited for in each step, save and evaluation.

    Only the pretended accelerator reports it.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def note(self, moment: str | None) -> None:
        from ..pretend import device

        # The first two calls of each hook of a user's callback, such as these, are watched.
        waits = [each for each in device.syncs if not each.startswith("model_watch")]
        if moment is not None and waits:
            self.found[moment] = waits
        device.syncs.clear()

    def on_fit_start(self, trainer: Trainer) -> None:
        self.note(None)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.note(f"step {report.optimizer_step}")

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        self.note(f"save {trainer.state.optimizer_step}")

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.note(f"evaluation {trainer.state.optimizer_step}")


def steps_that_waited(waits: Mapping[str, Any]) -> set[int]:
    return {int(moment.split()[1]) for moment in waits if moment.startswith("step")}


def train_digits(
    folder: Path,
    stops: tuple[int | None, ...] = (None,),
    precision: Literal["no", "bf16", "fp16"] = "no",
) -> None:
    """Train for 12 steps in 2 epochs, by one start for each of `stops`."""
    config = cifar.Config(
        seed=1,
        dataset="digits",
        model=ModelConfig(name="resnet8"),
        augment=AugmentConfig(crop_padding=1),
        batch=BatchConfig(per_device_batch_size=240),
        trainer=TrainerConfig(num_epochs=2, log_every_n_steps=4, max_grad_norm=1.0, ema_decay=0.9),
        checkpoint=CheckpointConfig(every_n_steps=5),
        runtime=RuntimeConfig(num_threads=1, mixed_precision=precision),
        run=RunConfig(output_dir=folder, cache_dir=folder.parent / "cache"),
    )
    for max_steps in stops:
        cifar.train(replace(config, trainer=replace(config.trainer, max_steps=max_steps)))


def train_digits_without_float64(folder: Path) -> None:
    from ..pretend import device

    device.refuses_float64 = True
    waits = Waits()
    workload.add_callback(cifar, waits)
    train_digits(folder)
    print(json.dumps(waits.found))


def test_the_pretend_device_has_the_bits_of_the_cpu_and_waits_for_no_step(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    processes.run(train_digits, tmp_path / "cpu", folder=tmp_path / "logs-cpu")
    job = processes.run_on(
        "pretend", train_digits_without_float64, tmp_path / "pretend", folder=tmp_path / "logs"
    )
    assert final_files(tmp_path / "pretend") == final_files(tmp_path / "cpu")
    waits = json.loads(job.output().splitlines()[-1])
    # A row is written after the hooks of other callbacks, which see its wait in their next hook: in
    # the next step, or in the evaluation at the end of an epoch.
    after_a_row = {5, 9}
    first_of_an_epoch = {1, 7}
    # The first two steps are followed by a look at what a checkpoint would hold.
    rehearsed = {2, 3}
    # So are the first two calls of a user's hook, as those after the saves of steps 5 and 6.
    watched = {6, 7}
    expected = after_a_row | first_of_an_epoch | rehearsed | watched
    assert steps_that_waited(waits) == expected, waits
    # A save waits for the next row's sums, its losses, norms and sample ids, and copies the rest
    # in the background. No hook is watched at this one.
    assert 0 < len(waits["save 10"]) <= 3, waits


@pytest.mark.parametrize(
    ("accelerator", "precision"),
    [
        *slow([("pretend", "no")]),
        *(pytest.param("gpu", name, marks=pytest.mark.gpu) for name in ("no", "bf16", "fp16")),
    ],
)
def test_a_run_that_was_stopped_in_an_epoch_ends_with_the_same_bytes(
    tmp_path: Path, accelerator: str, precision: str
) -> None:
    pytest.importorskip("sklearn")
    for name, stops in {"whole": (None,), "parts": (3, 8, None)}.items():
        logs = tmp_path / f"logs-{name}"
        processes.run_on(accelerator, train_digits, tmp_path / name, stops, precision, folder=logs)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def train_with_dropout(folder: Path, stops: tuple[int | None, ...]) -> None:
    config = workload.make_config(folder, checkpoint=CheckpointConfig(every_n_steps=2))
    for max_steps in stops:
        trainer = replace(config.trainer, max_steps=max_steps)
        workload.train(replace(config, trainer=trainer), norm="batch", dropout=0.3)


@on_each_accelerator
def test_dropout_is_the_same_after_a_resume(tmp_path: Path, accelerator: str) -> None:
    for name, stops in {"whole": (None,), "parts": (3, 7, None)}.items():
        logs = tmp_path / f"logs-{name}"
        processes.run_on(accelerator, train_with_dropout, tmp_path / name, stops, folder=logs)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def meet_a_bad_sample(folder: Path) -> None:
    watcher = test_nonfinite_report.Watcher()
    with pytest.raises(DivergedError):
        test_nonfinite_report.run(
            folder, policy="stop", watcher=watcher, checkpoint=CheckpointConfig()
        )
    (record,) = test_nonfinite_report.records(folder)
    step = record["optimizer_step"]
    assert record["nonfinite_sample_ids"] == [test_nonfinite_report.BAD]
    assert len(watcher.reports) == step, "it was found in the step after it"
    is_weight = re.compile(r"(model|optimizer)\.(?!.*(running|num_batches))").match
    before, after = (
        {name: tensor for name, tensor in watcher.after[moment].items() if is_weight(name)}
        for moment in (step - 1, step)
    )
    assert test_nonfinite_report.are_equal(before, after)


@on_each_accelerator
def test_a_nan_that_is_found_a_step_later_names_its_sample(
    tmp_path: Path, accelerator: str
) -> None:
    processes.run_on(accelerator, meet_a_bad_sample, tmp_path / "run", folder=tmp_path / "logs")


def train_from_a_dataset(folder: Path) -> None:
    waits = Waits()
    workload.train(workload.make_config(folder), num_workers=0, callbacks=(waits,))
    print(json.dumps(waits.found))


def test_the_host_waits_for_no_batch_of_a_dataset(tmp_path: Path) -> None:
    job = processes.run_on(
        "pretend", train_from_a_dataset, tmp_path / "run", folder=tmp_path / "logs"
    )
    waits = json.loads(job.output().splitlines()[-1])
    # A save or an evaluation follows each row, and its wait is seen there.
    # The first step checks the task, and what it has changed is seen before the second one. The
    # hook after the second save is the last one that is watched.
    assert steps_that_waited(waits) == {1, 2, 3}
    assert {3, 6, 9} <= {int(moment.split()[1]) for moment in waits if "save" in moment}


class RefuseWaiting(Callback):
    """Lets torch raise for whatever makes the host wait for the GPU after the second step."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        torch.cuda.set_sync_debug_mode("error" if 2 <= report.optimizer_step < 8 else "default")


def train_without_waiting(
    folder: Path, max_grad_norm: float | None, num_workers: int | None
) -> None:
    config = workload.make_config(
        folder, batch=BatchConfig(per_device_batch_size=8), checkpoint=CheckpointConfig()
    )
    changes: dict[str, Any] = {
        "max_grad_norm": max_grad_norm,
        "log_every_n_steps": 1000,
        "num_epochs": 1,
    }
    config = replace(config, trainer=replace(config.trainer, **changes))
    callbacks = (RefuseWaiting(),)
    workload.train(config, norm="batch", dropout=0.1, num_workers=num_workers, callbacks=callbacks)


@pytest.mark.gpu
@pytest.mark.parametrize(("max_grad_norm", "num_workers"), [(None, None), (5.0, None), (5.0, 0)])
def test_a_step_never_waits_for_the_gpu(
    tmp_path: Path, max_grad_norm: float | None, num_workers: int | None
) -> None:
    arguments = (tmp_path / "run", max_grad_norm, num_workers)
    processes.run_on("gpu", train_without_waiting, *arguments, folder=tmp_path / "logs")


def train_in_float64(folder: Path, batch_size: int, has_met_before: bool, backend: str) -> None:
    if has_met_before:
        PartialState()  # forms a group for tensors of the accelerator, and those only
    if backend:
        # accelerate would give DDP the local rank as the number of the GPU that they share
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=batch_size),
        checkpoint=CheckpointConfig(),
        runtime=RuntimeConfig(backend=backend or None),
    )
    workload.train(config, dtype=torch.float64, norm="batch")


@pytest.mark.parametrize(
    ("accelerator", "have_met_before", "backend"),
    [
        ("pretend", True, ""),
        *slow([("pretend", False, "")]),
        pytest.param("gpu", True, "", marks=pytest.mark.gpu(2)),
        pytest.param("gpu", False, "", marks=pytest.mark.gpu(2)),
        pytest.param("gpu", False, "gloo", marks=pytest.mark.gpu),  # they share one
    ],
)
def test_two_processes_train_the_model_of_one(
    tmp_path: Path, accelerator: str, have_met_before: bool, backend: str
) -> None:
    for number in (1, 2):
        arguments = (tmp_path / str(number), 32 // number, have_met_before and number > 1, backend)
        logs = tmp_path / f"logs-{number}"
        processes.run_on(
            accelerator, train_in_float64, *arguments, num_processes=number, folder=logs
        )
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= 1e-12


def lose_two_labels() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device)
    logits.requires_grad_()
    targets = torch.tensor([0, 3, -1, 2])
    batch = Batch(logits.detach(), targets.to(device), torch.arange(4).to(device))
    losses = ClassificationTask().loss(logits, batch).losses
    losses.sum().backward()
    assert logits.grad is not None
    are_usable = torch.tensor([True, False, False, True])
    usable = torch.tensor([0, 3]).to(device)
    expected = F.cross_entropy(logits.detach()[usable], batch.targets[usable], reduction="none")
    assert losses.detach().cpu()[are_usable].tolist() == expected.cpu().tolist()
    for found in (losses.detach().cpu(), logits.grad.cpu()):
        assert found.isnan().reshape(4, -1).all(1).tolist() == (~are_usable).tolist()


@on_each_accelerator
def test_a_label_on_a_device_that_is_no_class_makes_only_its_loss_nan(
    tmp_path: Path, accelerator: str
) -> None:
    processes.run_on(accelerator, lose_two_labels, folder=tmp_path)
