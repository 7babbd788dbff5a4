"""Streams: each sample once for any number of processes, from any step, and nothing lost in a
stop."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer import (
    BatchConfig,
    BatchPlan,
    ClassificationTask,
    ConfigError,
    DataError,
    EvalLoader,
    MeanLoss,
    StreamReader,
    TrainLoader,
    build_eval_loader,
    build_train_loader,
    build_trainer,
    start_run,
)
from accel_trainer.data.order import choose_order

from .. import workload

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


def loader_of(
    plan: BatchPlan, stream: Any = Numbers, *, process_index: int = 0
) -> TrainLoader[StreamReader]:
    order = choose_order(BatchConfig(order="stored"), plan.num_samples)
    reader = StreamReader(stream, plan.num_samples)
    return TrainLoader(reader, plan, seed=0, device=CPU, process_index=process_index, order=order)


def read(
    loader: TrainLoader[StreamReader], epoch: int, first_step: int = 0
) -> list[list[list[int]]]:
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
    loaders = [loader_of(plan, process_index=index) for index in range(num_processes)]
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
        loader = loader_of(plan, process_index=index)
        whole = read(loader, 3)
        for first_step in range(plan.steps_per_epoch):
            assert read(loader, 3, first_step) == whole[first_step:]


def test_a_process_without_samples_gets_an_empty_batch() -> None:
    plan = BatchPlan(num_samples=9, global_batch_size=8, per_device_batch_size=2, num_processes=4)
    loader = loader_of(plan, lambda epoch: Numbers(epoch, 9), process_index=3)
    (last,) = loader.step_batches(0, 1)
    (batch,) = last.micro_batches
    assert (batch.inputs.shape, len(batch), last.num_samples) == ((0, 1), 0, 1)


def test_a_stream_that_ends_early_is_named() -> None:
    plan = BatchPlan(num_samples=40, global_batch_size=8, per_device_batch_size=8)
    with pytest.raises(DataError, match="the stream ended before sample 29, counted from 0: lower"):
        read(loader_of(plan), 0)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_an_evaluation_has_each_sample_once(num_processes: int) -> None:
    loaders = [
        EvalLoader(
            StreamReader(lambda epoch: Numbers(0), NUM_SAMPLES),
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

    reader = StreamReader(lambda epoch: Numbers(0), 8, collate=collate)
    batch, accelerator = BatchConfig(global_batch_size=4), Accelerator(cpu=True)
    train = build_train_loader(reader, batch, seed=0, accelerator=accelerator)
    test = build_eval_loader(reader, batch, num_parts=1, accelerator=accelerator)
    for batch in (next(train.step_batches(0, 0)).micro_batches[0], next(test.batches())):
        assert batch.inputs.keys() == {"number"}
        assert (batch.inputs["number"].flatten() % 2 == batch.targets).all()


def train(folder: Path, num_workers: int, *stops: int) -> None:
    for max_steps in (*stops, None):
        config = workload.make_config(folder)
        config = replace(config, trainer=replace(config.trainer, max_steps=max_steps))
        with start_run(config, recipe="stream") as run:
            model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
            task, metrics = ClassificationTask(), [MeanLoss()]
            build_trainer(
                run,
                model=model,
                task=task,
                train_set=StreamReader(
                    lambda epoch: DataLoader(
                        Numbers(epoch), batch_size=None, num_workers=num_workers
                    ),
                    NUM_SAMPLES,
                ),
                eval_sets=StreamReader(lambda epoch: Numbers(0), NUM_SAMPLES),
                metrics=metrics,
            ).fit()


def test_something_other_than_a_function_that_starts_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of type list cannot start a stream: pass a function"):
        StreamReader([1, 2], 2)  # type: ignore[arg-type]


class Seekable(Numbers):
    """A stream that can begin at any sample, and knows how many it has yielded."""

    num_yielded = 0
    position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for sample in islice(super().__iter__(), self.position, None):
            self.num_yielded += 1
            yield sample


@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_stream_with_seek_begins_at_the_first_step(num_processes: int) -> None:
    plan = BatchPlan(
        num_samples=NUM_SAMPLES,
        global_batch_size=12,
        per_device_batch_size=2,
        num_processes=num_processes,
    )
    for index in range(num_processes):
        whole = read(loader_of(plan, process_index=index), 3)
        for first_step in range(plan.steps_per_epoch):
            stream = Seekable(3)
            loader = loader_of(plan, lambda epoch, stream=stream: stream, process_index=index)
            found = read(loader, 3, first_step)
            assert found == whole[first_step:]
            assert stream.num_yielded <= NUM_SAMPLES - 12 * first_step


def test_the_bytes_of_a_file_are_not_its_samples() -> None:
    lines = "".join(f"{number}\n" for number in range(9))

    def collate(samples: list[str]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor([float(sample) for sample in samples])
        return numbers[:, None], numbers.long()

    reader = StreamReader(lambda epoch: io.StringIO(lines), 9, collate=collate)
    (batch,) = reader.read([torch.tensor([5, 6])], None)
    assert batch.targets.tolist() == [5, 6]


def test_a_stream_is_never_read_in_a_different_order(tmp_path: Path) -> None:
    reader = StreamReader(Numbers, NUM_SAMPLES)
    with pytest.raises(ConfigError, match="ORDER.*a stream cannot go back from sample 3 to 2: let"):
        list(reader.read([torch.tensor([3]), torch.tensor([2])], 0))
    for changes in ({"order": "balanced"}, {"leave_out": tmp_path / "bad.txt"}):
        batch = BatchConfig(per_device_batch_size=4, **changes)
        with pytest.raises(ConfigError, match="a StreamReader determines its own order: leave"):
            build_train_loader(reader, batch, seed=0, accelerator=Accelerator(cpu=True))
