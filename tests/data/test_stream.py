"""Streams: each sample once for any number of processes, from any step, and nothing lost in a
stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer import (
    BatchConfig,
    BatchPlan,
    ClassificationTask,
    ConfigError,
    DataError,
    MeanLoss,
    StreamEvalLoader,
    StreamLoader,
    build_stream_loaders,
    build_trainer,
    start_run,
)

from .. import processes, workload
from ..variants import slow

NUM_SAMPLES = 29
CPU = torch.device("cpu")


class Numbers(IterableDataset[tuple[Tensor, int]]):
    """Samples whose order depends on the epoch; the input of a sample is its number."""

    def __init__(self, epoch: int, length: int = NUM_SAMPLES) -> None:
        self._order = torch.randperm(
            length, generator=torch.Generator().manual_seed(epoch)
        ).tolist()

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.tensor([float(number)]), number % 2) for number in self._order)


def read(loader: StreamLoader, epoch: int, first_step: int = 0) -> list[list[list[int]]]:
    """The samples of each micro-batch of each step."""
    steps = loader.step_batches(epoch, first_step)
    return [
        [batch.inputs.flatten().int().tolist() for batch in step.micro_batches] for step in steps
    ]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_steps_have_the_samples_of_the_stream_in_its_order(num_processes: int) -> None:
    plan = BatchPlan(
        num_samples=NUM_SAMPLES,
        global_batch_size=8,
        per_device_batch_size=1,
        num_processes=num_processes,
    )
    loaders = [
        StreamLoader(Numbers, plan, device=CPU, process_index=index)
        for index in range(num_processes)
    ]
    for epoch in (0, 1):
        order = [number for _, number in enumerate(Numbers(epoch)._order)]
        of_processes = [read(loader, epoch) for loader in loaders]
        for step in range(plan.steps_per_epoch):
            seen = [number for steps in of_processes for batch in steps[step] for number in batch]
            assert seen == order[8 * step : 8 * step + 8]


@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_loader_starts_at_any_step(num_processes: int) -> None:
    plan = BatchPlan(
        num_samples=NUM_SAMPLES,
        global_batch_size=12,
        per_device_batch_size=2,
        num_processes=num_processes,
    )
    for index in range(num_processes):
        loader = StreamLoader(Numbers, plan, device=CPU, process_index=index)
        whole = read(loader, 3)
        for first_step in range(plan.steps_per_epoch):
            assert read(loader, 3, first_step) == whole[first_step:]


def test_a_process_without_samples_gets_an_empty_batch() -> None:
    plan = BatchPlan(num_samples=9, global_batch_size=8, per_device_batch_size=2, num_processes=4)
    (last,) = StreamLoader(
        lambda epoch: Numbers(epoch, 9), plan, device=CPU, process_index=3
    ).step_batches(0, 1)
    (batch,) = last.micro_batches
    assert (batch.inputs.shape, len(batch), last.num_samples) == ((0, 1), 0, 1)


def test_a_stream_that_ends_early_is_named() -> None:
    plan = BatchPlan(num_samples=40, global_batch_size=8, per_device_batch_size=8)
    with pytest.raises(
        DataError, match="the stream ended before sample 29, counted from 0: lower num_train"
    ):
        read(StreamLoader(Numbers, plan, device=CPU), 0)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_an_evaluation_has_each_sample_once(num_processes: int) -> None:
    loaders = [
        StreamEvalLoader(
            lambda: Numbers(0),
            NUM_SAMPLES,
            batch_size=4,
            device=CPU,
            num_processes=num_processes,
            process_index=index,
        )
        for index in range(num_processes)
    ]
    ids = [
        sample_id
        for loader in loaders
        for batch in loader.batches()
        for sample_id in batch.sample_ids.tolist()
    ]
    assert ids == list(range(NUM_SAMPLES))


def test_a_collate_function_makes_the_batches_of_both_loaders() -> None:
    def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        numbers, labels = zip(*samples, strict=True)
        return {"number": torch.stack(numbers), "labels": torch.tensor(labels)}

    train, test = build_stream_loaders(
        Numbers,
        lambda: Numbers(0),
        BatchConfig(global_batch_size=4),
        num_train=8,
        num_test=5,
        accelerator=Accelerator(cpu=True),
        collate=collate,
    )
    for batch in (next(train.step_batches(0, 0)).micro_batches[0], next(test.batches())):
        assert batch.inputs.keys() == {"number"}
        assert (batch.inputs["number"].flatten() % 2 == batch.targets).all()


@pytest.mark.parametrize("num_workers", [0, *slow([1])])
def test_a_run_on_a_stream_resumes_bit_for_bit(tmp_path: Path, num_workers: int) -> None:
    """The stream is a torch DataLoader, as users have it."""
    for name, stops in (("whole", ()), ("parts", (2, 5))):
        options = {
            "num_processes": 1,
            "folder": tmp_path / f"logs-{name}",
            "has_workers": bool(num_workers),
        }
        job = processes.start(train, tmp_path / name, num_workers, *stops, **options)
        assert job.wait() == [0], job.output()
    whole, parts = (
        load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def train(folder: Path, num_workers: int, *stops: int) -> None:
    for max_steps in (*stops, None):
        config = workload.make_config(folder)
        config = replace(config, trainer=replace(config.trainer, max_steps=max_steps))
        with start_run(config, recipe="stream") as run:
            loader, eval_loader = build_stream_loaders(
                lambda epoch: DataLoader(Numbers(epoch), batch_size=None, num_workers=num_workers),
                lambda: Numbers(0),
                run.config.batch,
                num_train=NUM_SAMPLES,
                num_test=NUM_SAMPLES,
                accelerator=run.accelerator,
            )
            model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
            task, metrics = ClassificationTask(), [MeanLoss()]
            build_trainer(
                run,
                model=model,
                task=task,
                train_set=loader,
                eval_sets=eval_loader,
                metrics=metrics,
            ).fit()


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            [1, 2],
            list,
            r"of type list cannot start a stream: pass a function for which train\(epoch\) yields",
        ),
        (
            lambda epoch: iter(()),
            Numbers(0),
            r"of type Numbers cannot start a stream: .* for which test\(\) yields samples",
        ),
    ],
)
def test_something_other_than_a_function_that_starts_a_stream_is_refused(
    train: Any, test: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_stream_loaders(
            train, test, BatchConfig(), num_train=256, num_test=2, accelerator=Accelerator()
        )
