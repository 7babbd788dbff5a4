"""Out of memory: one line with the way out, or with `--fit-batch` the same training in smaller forwards."""

from __future__ import annotations

import json
import os
import resource
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    EvalOutput,
    RecipeConfig,
    StepOutput,
    Trainer,
    main,
    start_run,
)
from accel_trainer.cli.doctor.symptoms import diagnose
from accel_trainer.fault_tolerance.out_of_memory import describe_peak, is_out_of_memory
from accel_trainer.run.resume import with_batch

from .. import processes, workload
from ..distributed.test_fsdp import FSDP
from ..training.test_exactness import final_files, history, largest_difference
from ..variants import slow

BAD_STEP = 7  # of 10, in the second epoch


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB.")


def ask_for_too_much() -> None:
    torch.empty(1 << 60)  # what torch's own allocator then says


class Cramped(ClassificationTask, Callback):
    """A classification for which, in and after a step, memory has room for forwards of `room` samples."""

    def __init__(self, room: int, *, step: int = BAD_STEP, rank: int = 0, where: str = "forward") -> None:
        super().__init__()
        self.room, self.step, self.rank, self.where = room, step, rank, where
        self.next_step, self.num_forwards, self.sizes = 1, 0, list[int]()
        self.activations: weakref.ref[Tensor] | None = None
        self.was_freed: list[bool] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.next_step = trainer.state.optimizer_step + 1

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        self.next_step, self.num_forwards = report.optimizer_step + 1, 0

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        if self.activations is not None:
            self.was_freed.append(self.activations() is None)
            self.activations = None

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.sizes.append(len(batch))
        self.num_forwards += 1
        output = super().train_step(model, batch)
        if not self.is_short_of_memory(batch):
            return output
        activations = output.loss_sum * 1
        self.activations = weakref.ref(activations)
        if self.where == "forward":
            run_out()
        if self.where == "host":
            ask_for_too_much()
        activations.register_hook(lambda gradient: run_out())
        return StepOutput(activations, output.sums)

    def is_short_of_memory(self, batch: Batch) -> bool:
        if self.where == "second backward" and self.num_forwards == 1:
            return False  # so that the gradients of the first are there
        is_here = self.next_step >= self.step and int(os.environ.get("RANK", 0)) == self.rank
        return is_here and len(batch) > self.room


class KilledAt(Callback):
    """SIGKILL when a checkpoint at, or a step after, the shortage is reached."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        if self.moment == "save" and trainer.state.optimizer_step == BAD_STEP - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        if report.optimizer_step == {"step": BAD_STEP, "later": BAD_STEP + 2}.get(self.moment):
            os.kill(os.getpid(), signal.SIGKILL)


def make_config(folder: Path, size: int = 16, *, fit: bool = True, **changes: Any) -> RecipeConfig:
    """Return a config that saves before the step without memory, and after each epoch."""
    batch = BatchConfig(per_device_batch_size=size, eval_batch_size=10, fit_batch=fit)
    checkpoint = CheckpointConfig(every_n_steps=BAD_STEP - 1)
    return workload.make_config(folder, **{"batch": batch, "checkpoint": checkpoint, **changes})


def only_line(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "out of memory" in line]
    assert "Traceback" not in text
    return line


def test_the_line_tells_what_to_do_about_fragmented_memory_on_a_gpu() -> None:
    assert describe_peak(3 << 30, 0) == "peak 3.00 GiB", "a CPU reserves nothing"
    assert describe_peak(9 << 30, 10 << 30) == "peak 9.00 GiB"
    fix = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert describe_peak(6 << 30, 10 << 30) == f"peak 6.00 GiB of 10.00 GiB reserved, the rest in fragments: {fix}"


# --- with --fit-batch ---


@pytest.mark.parametrize(
    ("where", "num_workers"),
    [
        ("forward", None),
        ("second backward", 0),
        *slow([("forward", 0), ("backward", None), ("backward", 0), ("second backward", None)]),
        *slow([("host", None), ("host", 0)]),
    ],
)
def test_the_run_continues_with_smaller_forwards_to_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, num_workers: int | None
) -> None:
    size = 8 if where == "second backward" else 16
    batch = BatchConfig(per_device_batch_size=size, global_batch_size=16, eval_batch_size=10, fit_batch=True)
    task = Cramped(4, where=where)
    options = {"num_workers": num_workers, "dtype": torch.float64}
    workload.train(make_config(tmp_path / "whole", batch=batch), **options)
    workload.train(make_config(tmp_path / "cramped", batch=batch), task=task, callbacks=(task,), **options)
    assert largest_difference(tmp_path / "whole", tmp_path / "cramped") <= 1e-9
    for mine, theirs in zip(history(tmp_path / "whole"), history(tmp_path / "cramped"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    said = [text for text in caplog.messages if "out of memory" in text]
    assert [text.rpartition(": ")[2] for text in said] == ["continuing with 8 x 2", "continuing with 4 x 4"][
        -len(said) :
    ]
    assert said[0].startswith(f"out of memory at step 7 with {size} per device (peak ")
    assert task.was_freed == [True] * len(said)
    assert max(task.sizes[-4:]) == 4
    stored = yaml.safe_load((tmp_path / "cramped" / "config.yaml").read_text())["batch"]
    assert (stored["per_device_batch_size"], stored["global_batch_size"]) == (4, 16)


@pytest.mark.parametrize("num_workers", [None, *slow([2])])
def test_it_is_a_resume_in_memory(tmp_path: Path, num_workers: int | None) -> None:
    """The same bytes as a run that stopped before the step and was continued with the smaller micro-batch."""
    options = {"norm": "batch", "dropout": 0.2, "num_workers": num_workers}
    job = processes.start(
        compare_with_a_resume, tmp_path, options, num_processes=1, folder=tmp_path / "logs", has_workers=True
    )
    assert job.wait() == [0], job.output()


def compare_with_a_resume(folder: Path, options: dict[str, Any]) -> None:
    task = Cramped(4)
    workload.train(make_config(folder / "cramped"), task=task, callbacks=(task,), **options)
    first = make_config(folder / "resumed", fit=False)
    workload.train(replace(first, trainer=replace(first.trainer, max_steps=BAD_STEP - 1)), **options)
    workload.train(make_config(folder / "resumed", 4, fit=False), **options)
    assert final_files(folder / "cramped") == final_files(folder / "resumed")


class Hungry(ClassificationTask):
    """A classification whose forward takes 64 MiB a sample for as long as it lasts."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        taken = torch.empty(len(batch) << 26, dtype=torch.uint8)
        output = super().train_step(model, batch)
        return StepOutput(output.loss_sum + 0 * taken[0], output.sums)


def test_a_real_limit_of_memory_is_met_with_what_fits_below_it(tmp_path: Path) -> None:
    job = processes.run(train_below_a_limit, tmp_path / "run", folder=tmp_path / "logs")
    line = only_line(job.output())
    assert line.startswith("out of memory at step 1 with 16 per device")
    assert line.endswith("continuing with 8 x 2")


def train_below_a_limit(folder: Path) -> None:
    config = make_config(folder)
    few = replace(config, trainer=replace(config.trainer, max_steps=1))
    workload.train(replace(few, run=replace(few.run, output_dir=folder / "before")))  # all that is loaded late
    taken = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines()
                 if line.startswith("VmSize"))  # fmt: skip
    resource.setrlimit(resource.RLIMIT_AS, (taken + (760 << 20), resource.RLIM_INFINITY))
    workload.train(replace(few, run=replace(few.run, output_dir=folder / "cramped")), task=Hungry())


def test_loss_scaling_makes_no_difference(tmp_path: Path) -> None:
    task, scalers = Cramped(4), [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    options = {"dtype": torch.float64}
    workload.train(make_config(tmp_path / "cramped"), task=task, callbacks=(task,), scaler=scalers[0], **options)
    workload.train(make_config(tmp_path / "whole"), scaler=scalers[1], **options)
    assert largest_difference(tmp_path / "whole", tmp_path / "cramped") <= 1e-9


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that had to continue with a smaller micro-batch, and was not killed."""
    folder = tmp_path_factory.mktemp("cramped")
    processes.run(train_cramped, folder / "run", None, folder=folder / "logs")
    return folder / "run"


@pytest.mark.parametrize("moment", ["save", "step", *slow(["later"])])
def test_killed_around_it_the_run_ends_with_the_same_bytes(tmp_path: Path, cramped: Path, moment: str) -> None:
    job = processes.start(train_cramped, tmp_path / "killed", moment, num_processes=1, folder=tmp_path / "logs-killed")
    assert job.wait() == [-signal.SIGKILL], job.output()
    again = processes.run(train_cramped, tmp_path / "killed", None, folder=tmp_path / "logs-again")
    assert final_files(tmp_path / "killed") == final_files(cramped)
    # Remembered, it is not tried out again; before that, the same happens again.
    assert ("out of memory" in again.output()) == (moment == "save")


def train_cramped(folder: Path, moment: str | None) -> None:
    task, base = Cramped(4), make_config(folder)
    config = replace(base, checkpoint=replace(base.checkpoint, every_n_steps=4))
    killer = () if moment is None else (KilledAt(moment),)
    workload.train(config, task=task, callbacks=(task, *killer), dropout=0.2)


@pytest.mark.parametrize(("step", "shards"), [(BAD_STEP, False), *slow([(1, False), (BAD_STEP, True)])])
def test_several_processes_resume_with_a_smaller_micro_batch(tmp_path: Path, step: int, shards: bool) -> None:
    """Only process 1 is out of memory, in the midst of collectives: the job ends at once."""
    processes.run(train_two, tmp_path / "whole", None, shards, num_processes=2, folder=tmp_path / "logs-0")
    arguments = (tmp_path / "cramped", step, shards)
    job = processes.start(train_two, *arguments, num_processes=2, folder=tmp_path / "logs-1")
    assert job.wait() == [75, 75], job.output()
    line = only_line(job.output(0))
    assert line.startswith(f"accel_trainer: error[PROCESS]: rank 1, step {step - 1}, training: out of memory")
    assert "the same command, started again, continues with 4 x 2" in line
    again = processes.run(train_two, *arguments, num_processes=2, folder=tmp_path / "logs-2")
    assert "out of memory" not in again.output(1)
    assert "\n4 per device x 2 processes x 2 accumulation = 16 per step" in again.output(0)
    exports = [load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "cramped")]
    torch.testing.assert_close(*exports, rtol=0, atol=1e-9)


def train_two(folder: Path, step: int | None, shards: bool) -> None:
    config = make_config(folder, 8)
    if shards:
        os.environ.update(FSDP)
        config = replace(config, trainer=replace(config.trainer, ema_decay=None))
    run_as_a_command(config, Cramped(4, step=step or 1000, rank=1))


def run_as_a_command(config: RecipeConfig, task: Cramped, **options: Any) -> None:
    main(
        lambda _: workload.train(config, task=task, callbacks=(task,), dtype=torch.float64, **options),
        RecipeConfig, description="", argv=[],
    )  # fmt: skip


# --- without, or when nothing smaller fits ---


def test_without_fit_batch_the_run_ends_in_one_line_and_with_it_resumes(tmp_path: Path) -> None:
    job = processes.start(train_alone, tmp_path / "run", 16, False, num_processes=1, folder=tmp_path / "1")
    assert job.wait() == [64]
    line = only_line(job.output())
    assert line.startswith("accel_trainer: error[OUT_OF_MEMORY]: out of memory at step 7 with 16 per device (peak")
    assert line.endswith(
        "start again with --fit-batch, or with --global-batch-size 16 --accumulate 2, which keeps the global batch"
    )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["optimizer_step"]) == ("failed", 64, 6)
    assert [finding.code for finding in diagnose(tmp_path / "run")] == ["OUT_OF_MEMORY"]
    processes.run(train_alone, tmp_path / "run", 16, True, folder=tmp_path / "2")
    workload.train(make_config(tmp_path / "whole"), dtype=torch.float64)
    assert largest_difference(tmp_path / "whole", tmp_path / "run") <= 1e-9


def train_alone(folder: Path, size: int, fit: bool, step: int = BAD_STEP) -> None:
    run_as_a_command(make_config(folder, size, fit=fit), Cramped(4, step=step))


def test_out_of_memory_at_the_first_step_leaves_the_folder_to_look_at(tmp_path: Path) -> None:
    job = processes.start(train_alone, tmp_path / "run", 16, False, 1, num_processes=1, folder=tmp_path / "logs")
    assert job.wait() == [64]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 64


@pytest.mark.parametrize(("size", "num_processes"), [(16, 1), (8, 2)])
def test_the_flags_it_names_make_it_fit(tmp_path: Path, size: int, num_processes: int) -> None:
    asked = BatchConfig(per_device_batch_size=size).plan(72, num_processes=num_processes)
    named = BatchConfig(per_device_batch_size=size, global_batch_size=16, accumulation_steps=2)
    plan = named.plan(72, num_processes=num_processes)
    assert plan == replace(asked, per_device_batch_size=size // 2)


def test_a_single_sample_that_does_not_fit_is_the_end(tmp_path: Path) -> None:
    task = Cramped(0)
    with pytest.raises(ConfigError, match=r"step 7 with 1 per device .*: use a smaller model"):
        workload.train(make_config(tmp_path, 3), task=task, callbacks=(task,))
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert newest.name.startswith("step-0000000006-")


class CrampedEvaluation(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> EvalOutput:
        run_out()
        raise AssertionError


def test_an_evaluation_names_its_own_flag_and_costs_no_step(tmp_path: Path) -> None:
    said = r"after step 5, phase evaluation .*: set --batch.eval-batch-size below 10"
    with pytest.raises(ConfigError, match=said):
        workload.train(make_config(tmp_path / "mended"), task=CrampedEvaluation())
    newest = max((tmp_path / "mended" / "checkpoints").glob("step-*"))
    assert newest.name.startswith("step-0000000005-"), "the epoch is not lost"
    for name in ("mended", "whole"):
        workload.train(make_config(tmp_path / name))
    assert final_files(tmp_path / "mended") == final_files(tmp_path / "whole")


class CrampedUpdate(Callback):
    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(lambda *unused: run_out())


def ask_numpy_for_too_much() -> None:
    np.empty(1 << 60, dtype=np.uint8)


@pytest.mark.parametrize("ask", [run_out, ask_for_too_much, ask_numpy_for_too_much])
def test_what_does_not_fit_before_training_is_one_line(tmp_path: Path, ask: Callable[[], None]) -> None:
    said = r"out of memory after step 0, phase start \(.*\): use a smaller model"
    with pytest.raises(ConfigError, match=said), start_run(make_config(tmp_path), recipe="workload"):
        ask()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 64)


def test_an_update_that_may_be_half_applied_is_not_retried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out of memory after step 0, phase training .*: use a smaller"):
        workload.train(make_config(tmp_path), callbacks=(CrampedUpdate(),))


# --- the parts ---


def test_errors_that_speak_of_memory_are_recognised_and_others_are_not() -> None:
    with pytest.raises(RuntimeError) as real:
        ask_for_too_much()
    for error in (real.value, torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError()):
        assert is_out_of_memory(error)
    for other in (RuntimeError(), RuntimeError(5), RuntimeError("shape"), ValueError("CUDA out of memory.")):
        assert not is_out_of_memory(other)


@pytest.mark.parametrize(
    ("stored", "asked", "in_force"),
    [
        ({}, {"per_device_batch_size": 64}, 64),
        ({"fit_batch": True, "per_device_batch_size": 16}, {"per_device_batch_size": 64}, 16),
        ({"fit_batch": True, "per_device_batch_size": 16}, {"per_device_batch_size": 8}, 8),
        ({"fit_batch": False, "per_device_batch_size": 16}, {"per_device_batch_size": 64}, 64),
        ({"fit_batch": True, "per_device_batch_size": 16}, {"accumulation_steps": 2}, 16),
        ({"fit_batch": True, "per_device_batch_size": 16}, {"accumulation_steps": 8}, 8),
        # With accumulation the size was never looked at.
        ({"fit_batch": True, "per_device_batch_size": 9, "accumulation_steps": 2}, {}, 64),
        ({"fit_batch": True, "per_device_batch_size": 16}, {"fit_batch": False}, 64),
    ],
)
def test_a_start_goes_on_with_the_smaller_of_what_is_asked_for_and_what_fitted(
    stored: dict[str, Any], asked: dict[str, Any], in_force: int
) -> None:
    batch = {"global_batch_size": 64, "accumulation_steps": 1, **stored}
    config = RecipeConfig(batch=BatchConfig(**{"fit_batch": True, **asked}))
    resolved = with_batch(config, {"batch": batch}, num_processes=1).batch
    plan = resolved.plan(1000, num_processes=1)
    assert (plan.per_device_batch_size, plan.global_batch_size) == (in_force, 64)
