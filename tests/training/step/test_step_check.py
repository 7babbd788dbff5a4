"""`--check-every`: a step that is computed twice changes nothing, and a wrong bit is found."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    ClassificationTask,
    ConfigError,
    Loader,
    RecipeConfig,
    RunResult,
    StepOutput,
    Trainer,
)
from accel_trainer.core.errors import ProcessError
from accel_trainer.core.types import LazyBatches, StepBatch

from ... import processes, workload
from ..test_exactness import final_files

NUM_TRAIN = 71  # the last step of an epoch has 7 samples


def config_of(folder: Path, *, every: int | None, reduce: Any = "float") -> RecipeConfig:
    """Return the config of 7 steps of four micro-batches over all processes."""
    batch = BatchConfig(
        per_device_batch_size=4, global_batch_size=16, eval_batch_size=4, reduce=reduce
    )
    config = workload.make_config(folder, batch=batch)
    trainer = replace(
        config.trainer, max_steps=7, check_every_n_steps=every, digest_every_n_steps=1
    )
    return replace(config, trainer=trainer, runtime=replace(config.runtime, num_threads=None))


class ReadOnce:
    """A loader that refuses to give a micro-batch twice."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.plan = loader.plan

    def step_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        for number, given in enumerate(self._loader.step_batches(epoch, first_step)):
            left = dict(enumerate(given.micro_batches))
            yield given._replace(micro_batches=LazyBatches(left.pop, len(left)))
            assert not left, f"step {number} was not read"


def fit_reading_once(trainer: Trainer) -> RunResult:
    vars(trainer)["loader"] = ReadOnce(trainer.loader)
    return trainer.fit()


def train(folder: Path, *, task: ClassificationTask | None = None, **options: Any) -> None:
    workload.train(
        config_of(folder, **options),
        num_train=NUM_TRAIN,
        norm="batch",
        dropout=0.2,
        task=task,
        fit=fit_reading_once,
    )


def train_with_and_without(folder: Path) -> None:
    for reduce in ("float", "exact"):
        for every in (2, None):
            train(folder / f"{reduce} {every}", every=every, reduce=reduce)


@pytest.mark.parametrize("number", [1, 2])
def test_checked_steps_leave_the_same_bytes(tmp_path: Path, number: int) -> None:
    processes.run(train_with_and_without, tmp_path, num_processes=number, folder=tmp_path)
    for reduce in ("float", "exact"):
        checked, plain = (final_files(tmp_path / f"{reduce} {every}") for every in (2, None))
        assert checked == plain


class FlippedBit(ClassificationTask):
    """On the last process, a bit of a gradient is wrong in one backward."""

    def __init__(self, *, backward: int) -> None:
        super().__init__()
        self._num_left = backward

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        self._num_left -= 1
        if self._num_left == 0 and os.environ.get("RANK", "1") == "1":
            weight = next(each for each in model.parameters() if each.shape == (8, 8, 3, 3))
            handle = weight.register_hook(lambda gradient: flipped(gradient, handle))
        return output


def flipped(gradient: Tensor, handle: Any) -> Tensor:
    handle.remove()
    wrong = gradient.clone()
    wrong.view(torch.int32)[0, 0, 0, 0] ^= 1
    return wrong


# Steps 1 and 2 have two micro-batches on each of two processes: the third is of step 2, and the
# fifth of its repetition.
@pytest.mark.parametrize("backward", [3, 5])
def test_a_wrong_bit_ends_the_run_and_names_the_device(tmp_path: Path, backward: int) -> None:
    """Fault (Numbers): a device computes different bits from the same numbers (silent data
    corruption) -> with `--check-every N`, each N-th step is computed twice before its update,
    and its gradients and buffers are compared. If they differ, one line names the device, the
    process and the first such gradient, and the run ends with exit code 70 before the update.
    The same command continues from the newest checkpoint. A third computation distinguishes a
    faulty device from an operation without a deterministic kernel, and from a forward that does
    not repeat itself. **Not detected by default**, and never in the update itself
    """
    job = processes.run(train_wrongly, tmp_path / "run", backward, num_processes=2, folder=tmp_path)
    told = (
        "step 2 is not applied, since cpu:0 of process 1 repeated the gradient of layers.3.weight"
    )
    for rank in (0, 1):
        assert f"{told} with different bits: test or replace the device" in job.output(rank)
        assert "exit code 70" in job.output(rank)


def train_wrongly(folder: Path, backward: int) -> None:
    with pytest.raises(ProcessError) as ended:
        train(folder, every=2, task=FlippedBit(backward=backward))
    print(f"exit code {ended.value.exit_code}: {ended.value}")


OWN = random.Random()


class Unrepeatable(ClassificationTask):
    """Draws from a generator that no step seeds."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * OWN.random())


def test_a_step_that_never_repeats_itself_is_told_from_a_device(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="and a third time with others again: keep"):
        train(tmp_path / "run", every=3, task=Unrepeatable())


class Unordered(Unrepeatable):
    """Calls what has no deterministic kernel on a CPU either."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().step(model, batch)


def test_an_operation_that_does_not_repeat_is_named_first(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="put_ has no deterministic kernel .*check_every=")
    with refused, warnings.catch_warnings():
        train(tmp_path / "run", every=3, task=Unordered())
