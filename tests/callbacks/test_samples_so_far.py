"""The sum over all samples of a run: the same however they were split, and whenever saved."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from accel_trainer.callbacks.metric_logger import Meters
from accel_trainer.callbacks.samples_so_far import SamplesSoFar
from accel_trainer.core.types import StepReport
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator

from .. import processes
from ..joined import joined_processes

NUM_STEPS = 600  # more than twice what is kept before it is added


def report(step: int, *, num_processes: int = 1, process_index: int = 0) -> StepReport:
    """A process's part of step `step`, whose ids wrap around 64 bits when they are mixed."""
    ids = torch.randperm(10_000, generator=torch.Generator().manual_seed(step))[:7]
    return StepReport(
        optimizer_step=step,
        epoch=0,
        learning_rate=0.1,
        loss_sum=torch.tensor(0.0),
        sums={},
        num_samples=7,
        grad_norm=None,
        was_skipped=step % 97 == 5,
        sample_ids=[ids.tensor_split(num_processes)[process_index]],
    )


def counted(first: int = 0, last: int = NUM_STEPS, *, total: int | None = 0) -> int | None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    samples = SamplesSoFar(accelerator, is_on=True)
    samples.restore(total)
    meters = Meters(accelerator, samples)
    for step in range(first, last):
        meters.update(report(step))
    meters.read()
    return samples.total()


def test_a_sum_goes_on_from_wherever_it_was_saved() -> None:
    whole = counted()
    for saved_at in (1, 255, 256, 300):
        assert counted(saved_at, total=counted(0, saved_at)) == whole
    assert counted(1) != whole


def test_a_sum_over_processes_is_that_of_one(tmp_path: Path) -> None:
    for num_processes, first, last in ((2, 0, 100), (3, 100, 400), (1, 400, NUM_STEPS)):
        arguments = (tmp_path / "state.json", first, last)
        processes.run(
            count_samples, *arguments, num_processes=num_processes, folder=tmp_path / str(first)
        )
    assert json.loads((tmp_path / "state.json").read_text()) == counted()


def count_samples(path: Path, first: int, last: int) -> None:
    """Go on from the sum at `path`, by whatever number of processes it was left there."""
    with joined_processes() as accelerator:
        samples = SamplesSoFar(accelerator, is_on=True)
        samples.restore(json.loads(path.read_text()) if path.exists() else 0)
        accelerator.wait_for_everyone()
        where = {
            "num_processes": accelerator.num_processes,
            "process_index": accelerator.process_index,
        }
        meters = Meters(accelerator, samples)
        for step in range(first, last):
            meters.update(report(step, **where))
        meters.read()
        total = samples.total()
        if accelerator.is_main_process:
            path.write_text(json.dumps(total))


def test_a_run_that_was_not_counted_from_its_start_has_no_sum() -> None:
    assert counted(300, total=None) is None
