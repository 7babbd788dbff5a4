"""Batches of any shape, and models of any: what a dataset gives reaches the model as it is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import (
    Batch,
    BatchConfig,
    CheckpointConfig,
    ClassificationTask,
    MeanLoss,
    TopKAccuracy,
    build_trainer,
    start_run,
)
from accel_trainer.data.fingerprint import NUM_REPEATS
from tests import processes, workload
from tests.training.test_exactness import final_files

NUM_TRAIN = 13  # with two processes the last step has a share of no samples


@dataclass
class Samples:
    """Samples of some shape made of eight numbers."""

    shape: Callable[[Tensor], Any]
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.shape(torch.randn(8, generator=torch.Generator().manual_seed(index))), index % 3


def as_dict(x: Tensor) -> Any:
    return {"left": x[:4], "right": {"part": x[4:], "name": "eight"}}


def as_tuple(x: Tensor) -> Any:
    return x[:4], [x[4:6], x[6:]]


class Sum(nn.Module):
    """A linear layer over whatever tensors are in its input, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, inputs: Any) -> Tensor:
        return self.linear(torch.cat(leaves(inputs), dim=1))


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else ()
    )
    return [leaf for item in items if not isinstance(item, str) for leaf in leaves(item)]


def train(
    folder: Path, shape: Callable[[Tensor], Any], max_steps: int | None = None, num_workers: int = 0
) -> None:
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    config = workload.make_config(
        folder,
        batch=BatchConfig(
            per_device_batch_size=4 // num_processes,
            global_batch_size=4,
            eval_batch_size=3,
            num_workers=num_workers,
        ),
        checkpoint=CheckpointConfig(),
    )
    config = replace(config, trainer=replace(config.trainer, max_steps=max_steps))
    with start_run(config, recipe="nested") as run:
        build_trainer(
            run,
            model=Sum(),
            task=ClassificationTask(),
            train_set=Samples(shape, NUM_TRAIN),
            eval_sets=Samples(shape, 5),
            metrics=[MeanLoss(), TopKAccuracy()],
        ).fit()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [as_dict, as_tuple])
def test_nested_inputs_train_as_one_tensor_does_and_resume_exactly(
    tmp_path: Path, shape: Callable[[Tensor], Any]
) -> None:
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        processes.run(train_each, folder, shape, num_processes=num_processes, folder=folder)
        flat, nested, parts = (final_files(folder / name) for name in ("flat", "nested", "parts"))
        names = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")
        assert all(nested[name] == flat[name] for name in names)
        assert parts == nested


def train_each(folder: Path, shape: Callable[[Tensor], Any]) -> None:
    train(folder / "flat", torch.Tensor.clone)
    train(folder / "nested", shape)
    train(folder / "parts", shape, 3)
    train(folder / "parts", shape)


def test_every_tensor_of_a_batch_is_moved_and_changed_and_nothing_else_is() -> None:
    batch = Batch(
        {"a": torch.ones(2), "b": ["text", torch.ones(2)]}, (torch.zeros(2), 3), torch.arange(2)
    )
    moved = batch.to(torch.device("meta"))
    assert moved.inputs["a"].is_meta
    assert moved.inputs["b"][0] == "text"
    assert moved.inputs["b"][1].is_meta
    assert moved.targets[0].is_meta
    assert moved.targets[1] == 3
    assert moved.sample_ids.is_meta
    assert [len(part) for part in (batch.map(lambda t: t[:0]).inputs["a"], batch.sample_ids)] == [
        0,
        2,
    ]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only an accelerator's driver can lock pages"
)
def test_every_tensor_of_a_batch_is_pinned() -> None:
    batch = Batch({"a": torch.ones(2)}, torch.zeros(2), torch.arange(2)).pin_memory()
    assert batch.inputs["a"].is_pinned()
    assert batch.targets.is_pinned()
    assert batch.sample_ids.is_pinned()


def test_a_net_of_three_dimensions_trains_with_channels_last_on(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.volume, self.flat, self.head = (
                nn.Conv3d(1, 4, 2),
                nn.Conv2d(4, 4, 1),
                nn.Linear(4, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.volume(x.view(-1, 1, 2, 2, 2))).flatten(3)
            return self.head(self.flat(x).mean((2, 3)))

    config = workload.make_config(tmp_path)
    with start_run(config, recipe="volume") as run:
        samples = Samples(torch.Tensor.clone, 24)
        model = Net()
        trainer = build_trainer(
            run,
            model=model,
            task=ClassificationTask(),
            train_set=samples,
            eval_sets=samples,
            metrics=[MeanLoss(), TopKAccuracy()],
        )
        assert model.flat.weight.is_contiguous(memory_format=torch.channels_last)
        assert trainer.fit().state == "done"


def test_workers_stay_for_all_epochs_and_evaluations(tmp_path: Path) -> None:
    job = processes.run(train_with_workers, tmp_path, folder=tmp_path / "logs", has_workers=True)
    pids = Counter((tmp_path / "pids").read_text().split())
    main = str(job.processes[0].pid)
    workers = [*pids.keys() - {main}]
    assert len(workers) == 2  # one that trains and one that evaluates the weights and their average
    num_tried = 5  # on which the metrics are tried before the first step
    assert sorted(pids[worker] for worker in workers) == [num_tried + 2 * 2 * 5, 2 * NUM_TRAIN]
    num_more = 2 * NUM_REPEATS - 2  # reads of two samples, under the same and other seeds
    assert pids[main] == (num_more + NUM_TRAIN) + (num_more + 5)  # what is hashed before


def train_with_workers(folder: Path) -> None:
    def note(x: Tensor) -> Tensor:
        with (folder / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return x

    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    train(folder / "run", note, None, 1)
