"""`DatasetOptions(order=)`: a function that returns the samples of an epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    DatasetOptions,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    StreamReader,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)

from .. import processes
from ..training.test_exactness import final_files, largest_difference
from ..variants import NUM_THREADS

SIZE = 40
Order = Callable[[int], Any]


def labels() -> torch.Tensor:
    return torch.arange(SIZE) % 3


def repeated(epoch: int) -> torch.Tensor:
    """Each of 12 samples twice in a row, as in repeated augmentation."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(SIZE, generator=generator)[:12].repeat_interleave(2)


def p_by_k(epoch: int) -> list[int]:
    """Batches of 2 classes with 4 samples each."""
    chosen = np.random.default_rng(epoch)
    classes = [np.flatnonzero(labels().numpy() == label) for label in range(3)]
    rows: list[int] = []
    for _ in range(4):
        for label in chosen.permutation(3)[:2]:
            rows += chosen.choice(classes[label], 4, replace=False).tolist()
    return rows


def torch_sampler(epoch: int) -> Any:
    generator = torch.Generator().manual_seed(epoch)
    return iter(RandomSampler(range(SIZE), generator=generator))


def weighted_sampler(epoch: int) -> Any:
    generator = torch.Generator().manual_seed(epoch)
    return WeightedRandomSampler((1 + labels()).tolist(), 20, generator=generator)


ORDERS: dict[str, Order] = {
    "repeated": repeated,
    "P x K": p_by_k,
    "torch's sampler": torch_sampler,
    "torch's weighted sampler": weighted_sampler,
}


class Note(Callback):
    unsaved_attributes = ("steps",)

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        ids = trainer.accelerator.gather(torch.cat([*report.sample_ids]))
        self.steps.append(ids.tolist())


def train(
    folder: Path,
    order: Order | None,
    *callbacks: Callback,
    max_steps: int | None = None,
    per_device: int = 4,
    batch: BatchConfig | None = None,
    data: Any = None,
    options: DatasetOptions | None = None,
    changes: tuple[str, ...] = (),
) -> Trainer:
    inputs = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).double()
    given = TensorDataset(inputs, labels())
    config = RecipeConfig(
        batch=batch or BatchConfig(per_device_batch_size=per_device, global_batch_size=8),
        trainer=TrainerConfig(num_epochs=3, max_steps=max_steps, ema_decay=0.9),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, quiet=True, allow_change=changes),
    )
    with start_run(config, recipe="order") as run:
        trainer = build_trainer(
            run,
            model=nn.Linear(5, 3).double(),
            task=ClassificationTask(),
            train_set=given if data is None else data,
            eval_sets=TensorDataset(-inputs[:8], labels()[:8]),
            options=options or DatasetOptions(order=order),
            callbacks=callbacks,
        )
        trainer.fit()
    return trainer


@pytest.mark.parametrize("name", ORDERS)
def test_a_run_has_the_samples_of_its_order_and_resumes_exactly(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    order, note = ORDERS[name], Note()
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "whole", order, note)
        for max_steps in (1, 4, 7, None):
            train(tmp_path / "parts", order, max_steps=max_steps)
    assert not caplog.records
    expected = [
        list(order(epoch))[first : first + 8]
        for epoch in range(3)
        for first in range(0, len(list(order(0))), 8)
    ]
    assert note.steps == [[int(each) for each in step] for step in expected]
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def train_repeated(folder: Path) -> None:
    train(folder, repeated)


def test_two_processes_split_the_steps_of_an_order(tmp_path: Path) -> None:
    train_repeated(tmp_path / "one")
    processes.run(train_repeated, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-12


def test_what_is_left_out_is_dropped_from_an_order(tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n17\n")
    note = Note()
    config = BatchConfig(per_device_batch_size=8, leave_out=ids)
    train(tmp_path / "run", lambda epoch: [*range(SIZE)], note, batch=config)
    kept = [each for each in range(SIZE) if each not in (3, 17)]
    assert note.steps[:5] == [kept[first : first + 8] for first in range(0, 38, 8)]


class Changing:
    """Returns other numbers in each start, from the second epoch on."""

    num_starts = 0

    def __init__(self) -> None:
        Changing.num_starts += 1
        self.start = Changing.num_starts

    def __call__(self, epoch: int) -> Any:
        return torch.arange(16) + (self.start if epoch else 0)


def test_numbers_that_a_resume_would_not_have_are_refused(tmp_path: Path) -> None:
    train(tmp_path, Changing(), max_steps=3)  # within the second epoch
    with pytest.raises(ConfigError, match="ORDER.*different numbers for epoch 1 than before"):
        train(tmp_path, Changing())


def test_an_order_that_was_changed_on_purpose_begins_its_epoch_again(tmp_path: Path) -> None:
    train(tmp_path, repeated, max_steps=4)
    note = Note()
    train(tmp_path, p_by_k, note, changes=("data",))
    assert note.steps[0] == p_by_k(1)[:8]


RANDOM = np.random.default_rng(0)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not repeatable": (
        {"order": lambda epoch: RANDOM.permutation(SIZE)},
        "ORDER.*different numbers for epoch 0 when it is called again",
    ),
    "another length": ({"order": lambda epoch: range(16 + epoch)}, "ORDER.*17 samples in epoch 1"),
    "no number": ({"order": lambda epoch: ["a", "b"]}, "ORDER.*returned .*from 0 to 39"),
    "not there": ({"order": lambda epoch: [0, 40]}, r"ORDER.*returned \[0, 40\].*from 0 to 39"),
    "batches": ({"order": lambda epoch: [[0, 1], [2, 3]]}, "ORDER.*returned.*a list or tensor"),
    "nothing": ({"order": lambda epoch: []}, r"ORDER.*returned \[\] for epoch 0"),
    "an empty tensor": (
        {"order": lambda epoch: torch.arange(0)},
        r"ORDER.*returned tensor\(\[\]",
    ),
    "one number": ({"order": lambda epoch: 5}, "ORDER.*returned 5 for epoch 0"),
    "no answer": ({"order": lambda epoch: None}, "ORDER.*returned None for epoch 0"),
    "another order": (
        {
            "order": repeated,
            "batch": BatchConfig(per_device_batch_size=8, order="stored"),
        },
        "ORDER.*order= decides alone",
    ),
    "weights": (
        {"order": None, "options": DatasetOptions(order=repeated, weights=[1.0] * SIZE)},
        "ORDER.*order= decides alone",
    ),
    "a stream": (
        {"order": repeated, "data": StreamReader(lambda epoch: iter([]), 40)},
        "ORDER.*StreamReader determines its own order.*order=",
    ),
    "a DataLoader": (
        {"order": None, "data": DataLoader(TensorDataset(labels()), sampler=[0, 1])},
        r"DATASET.*DataLoader.*DatasetOptions\(order=\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_order_that_is_none_is_refused(tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refused:
        train(tmp_path, **options)
    assert "\n" not in str(refused.value)


def by_process(folder: Path) -> None:
    place = int(os.environ["RANK"])
    with pytest.raises(
        ConfigError, match="ORDER.*different numbers for epoch 1 on another process"
    ):
        train(folder / "run", lambda epoch: torch.arange(16) + place * epoch)


def test_an_order_that_differs_between_processes_is_refused_on_all(tmp_path: Path) -> None:
    processes.run(by_process, tmp_path, num_processes=2, folder=tmp_path / "logs")
