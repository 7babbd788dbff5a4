"""Out of memory: one line with the way out."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    StepOutput,
    Trainer,
    main,
    start_run,
)
from accel_trainer.checks.out_of_memory import (
    describe_peak,
    explain_out_of_memory,
    is_out_of_memory,
)
from accel_trainer.cli.doctor.symptoms import diagnose
from accel_trainer.core.errors import OutOfMemoryError
from accel_trainer.fault_tolerance.activity import Activity

from .. import processes, workload
from ..training.test_exactness import final_files, largest_difference

BAD_STEP = 7  # of 10, in the second epoch


def run_out() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB."
    )


def ask_for_too_much() -> None:
    torch.empty(1 << 60)  # what torch's own allocator then says


class Cramped(ClassificationTask, Callback):
    """A classification for which, in and after a step, memory has room for forwards of `room`
    samples."""

    def __init__(
        self, room: int, *, step: int = BAD_STEP, rank: int = 0, where: str = "forward"
    ) -> None:
        super().__init__()
        self.room, self.bad_step, self.rank, self.where = room, step, rank, where
        self.next_step = 1
        self.num_forwards = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        self.next_step = trainer.state.optimizer_step + 1

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        self.next_step, self.num_forwards = report.optimizer_step + 1, 0

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.num_forwards += 1
        output = super().step(model, batch)
        if not self.is_short_of_memory(batch):
            return output
        activations = output.losses * 1
        if self.where == "forward":
            run_out()
        if self.where == "host":
            ask_for_too_much()
        activations.register_hook(lambda gradient: run_out())
        return StepOutput(activations)

    def is_short_of_memory(self, batch: Batch) -> bool:
        if self.where == "second backward" and self.num_forwards == 1:
            return False  # so that the gradients of the first are there
        is_here = self.next_step >= self.bad_step and int(os.environ.get("RANK", 0)) == self.rank
        return is_here and len(batch) > self.room


def make_config(folder: Path, size: int = 16, **changes: Any) -> RecipeConfig:
    """Return a config that saves before the step without memory, and after each epoch."""
    batch = BatchConfig(per_device_batch_size=size, eval_batch_size=10)
    checkpoint = CheckpointConfig(every_n_steps=BAD_STEP - 1)
    return workload.make_config(folder, **{"batch": batch, "checkpoint": checkpoint, **changes})


def only_line(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "out of memory" in line]
    assert "Traceback" not in text
    return line


def test_the_line_tells_what_to_do_about_fragmented_memory_on_a_gpu() -> None:
    assert describe_peak(3 << 30, 0) == "peak 3.00 GiB", "a CPU reserves nothing"
    assert describe_peak(9 << 30, 10 << 30) == "peak 9.00 GiB"
    fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert (
        describe_peak(6 << 30, 10 << 30)
        == f"peak 6.00 GiB of 10.00 GiB reserved, the rest in fragments: {fix}"
    )


class Hungry(ClassificationTask):
    """A classification whose forward takes 64 MiB a sample for as long as it lasts."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        taken = torch.empty(len(batch) << 26, dtype=torch.uint8)
        return StepOutput(super().step(model, batch).losses + 0 * taken[0])


def test_a_real_limit_of_memory_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    job = processes.run(train_below_a_limit, tmp_path / "run", folder=tmp_path / "logs", codes=[64])
    line = only_line(job.output())
    assert "out of memory after step 0, phase training (peak" in line
    assert "start again with --global-batch-size 16 --accumulate 2" in line


def train_below_a_limit(folder: Path) -> None:
    config = make_config(folder)
    few = replace(config, trainer=replace(config.trainer, max_steps=1))
    # all that is loaded late
    workload.train(replace(few, run=replace(few.run, output_dir=folder / "before")))
    taken = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize")
    )
    resource.setrlimit(resource.RLIMIT_AS, (taken + (760 << 20), resource.RLIM_INFINITY))
    run_as_a_command(replace(few, run=replace(few.run, output_dir=folder / "cramped")), Hungry())


def run_as_a_command(config: RecipeConfig, task: ClassificationTask) -> None:
    callbacks = (task,) if isinstance(task, Callback) else ()
    main(
        lambda _: workload.train(config, task=task, callbacks=callbacks, dtype=torch.float64),
        RecipeConfig,
        description="",
        argv=[],
    )


def test_out_of_memory_is_one_line_and_the_flags_that_it_names_resume(tmp_path: Path) -> None:
    """Fault (Signals and processes): out of GPU or host memory in a step -> one line that says what
    would fit, exit 64; older checkpoints are intact
    """
    job = processes.run(train_alone, tmp_path / "run", {}, folder=tmp_path / "1", codes=[64])
    line = only_line(job.output())
    said = "accel_trainer: error[OUT_OF_MEMORY]: out of memory after step 6, phase training (peak"
    assert line.startswith(said)
    flags = "--global-batch-size 16 --accumulate 2"
    assert line.endswith(
        f"start again with {flags}, which trains the same in forwards of half the size"
    )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["optimizer_step"]) == ("failed", 64, 6)
    assert [finding.code for finding in diagnose(status)] == ["OUT_OF_MEMORY"]
    named = {"global_batch_size": 16, "accumulation_steps": 2}
    processes.run(train_alone, tmp_path / "run", named, folder=tmp_path / "2")
    workload.train(make_config(tmp_path / "whole"), dtype=torch.float64)
    assert largest_difference(tmp_path / "whole", tmp_path / "run") <= 1e-9


def train_alone(folder: Path, changes: dict[str, int], step: int = BAD_STEP) -> None:
    config = make_config(folder)
    batch = replace(config.batch, **changes)
    run_as_a_command(replace(config, batch=batch), Cramped(8, step=step))


@pytest.mark.parametrize("where", ["backward", "second backward", "host"])
def test_out_of_memory_is_found_wherever_it_happens(tmp_path: Path, where: str) -> None:
    task = Cramped(4, where=where)
    named = {"global_batch_size": 16, "accumulation_steps": 2} if where == "second backward" else {}
    config = make_config(tmp_path)
    with pytest.raises(OutOfMemoryError, match="after step 6, phase training .*: start again with"):
        workload.train(
            replace(config, batch=replace(config.batch, **named)), task=task, callbacks=(task,)
        )


def test_one_process_out_of_memory_ends_all_with_its_line(tmp_path: Path) -> None:
    """Only process 1 is out of memory, in the midst of collectives: the job ends at once."""
    job = processes.run(train_two, tmp_path / "run", folder=tmp_path / "logs", codes=[64, 64])
    line = only_line(job.output(0))
    assert line.startswith(
        f"accel_trainer: error[PROCESS]: rank 1, step {BAD_STEP - 1}, training: out of memory"
    )
    assert "--global-batch-size 16 --accumulate 2" in line


def train_two(folder: Path) -> None:
    run_as_a_command(make_config(folder, 8), Cramped(4, rank=1))


def advice(batch: dict[str, Any], activity: Activity) -> str:
    config = BatchConfig(**{"per_device_batch_size": 16, **batch})
    activity.phase = "training"
    return explain_out_of_memory(config, activity, Accelerator(cpu=True)).message


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        ({"reduce": "exact", "global_batch_size": 64}, "with --reduce exact, a different"),
        ({"per_device_batch_size": 1}, "use a smaller model"),
        ({"global_batch_size": 48}, "--global-batch-size 48 --accumulate 6,"),
    ],
)
def test_the_advice_fits_the_batch(batch: dict[str, Any], fix: str) -> None:
    assert fix in advice(batch, Activity())


@pytest.mark.parametrize("coupling", [True, "gathered"])
def test_a_step_of_pairs_is_not_told_to_split_its_batch(coupling: bool | str) -> None:
    activity = Activity()
    activity.couples_batch = coupling
    said = advice({}, activity)
    assert "--accumulate" not in said
    assert said.endswith("; a smaller batch has fewer pairs and trains a different model")


def test_out_of_memory_at_the_first_step_leaves_the_folder_to_look_at(tmp_path: Path) -> None:
    processes.run(train_alone, tmp_path / "run", {}, 1, folder=tmp_path / "logs", codes=[64])
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 64


@pytest.mark.parametrize(("size", "num_processes"), [(16, 1), (8, 2)])
def test_the_flags_it_names_make_it_fit(tmp_path: Path, size: int, num_processes: int) -> None:
    asked = BatchConfig(per_device_batch_size=size).plan(72, num_processes=num_processes)
    named = BatchConfig(per_device_batch_size=size, global_batch_size=16, accumulation_steps=2)
    plan = named.plan(72, num_processes=num_processes)
    assert plan == replace(asked, per_device_batch_size=size // 2)


def test_a_single_sample_that_does_not_fit_is_the_end(tmp_path: Path) -> None:
    task = Cramped(0)
    with pytest.raises(ConfigError, match=r"after step 6, phase training .*: use a smaller model"):
        workload.train(make_config(tmp_path, 1), task=task, callbacks=(task,))
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert newest.name.startswith("step-0000000006-")


class CrampedEvaluation(ClassificationTask):
    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        run_out()
        raise AssertionError


def test_an_evaluation_names_its_own_flag_and_costs_no_step(tmp_path: Path) -> None:
    said = r"after step 5, phase evaluation .*: set BatchConfig.eval_batch_size=. below 10"
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
def test_what_does_not_fit_before_training_is_one_line(
    tmp_path: Path, ask: Callable[[], None]
) -> None:
    """Fault (Signals and processes): out of memory before training, in an evaluation, an update or
    a save -> one line, exit 64
    """
    said = r"out of memory after step 0, phase start \(.*\): use a smaller model"
    with (
        pytest.raises(ConfigError, match=said),
        start_run(make_config(tmp_path), recipe="workload"),
    ):
        ask()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 64)


def test_out_of_memory_in_an_update_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out of memory after step 0, phase training .*: start"):
        workload.train(make_config(tmp_path), callbacks=(CrampedUpdate(),))


# --- the parts ---


def test_errors_that_speak_of_memory_are_recognised_and_others_are_not() -> None:
    with pytest.raises(RuntimeError) as real:
        ask_for_too_much()
    for error in (
        real.value,
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.OutOfMemoryError(),
    ):
        assert is_out_of_memory(error)
    for other in (
        RuntimeError(),
        RuntimeError(5),
        RuntimeError("shape"),
        ValueError("CUDA out of memory."),
    ):
        assert not is_out_of_memory(other)
