"""Hardly any data: what can be trained is trained, and what cannot says so with the numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accel_trainer import BatchConfig, DataError, RecipeConfig, main
from tests import processes, workload


class FlatNet(workload.SmallNet):
    """Its norm has one value per channel and image: [B, 3, 8, 8] -> [B, K]."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        layers = [
            nn.Flatten(),
            nn.Linear(192, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, workload.NUM_CLASSES),
        ]
        self.layers = nn.Sequential(*layers)


def train(folder: Path, num_train: int, batch: BatchConfig, **options: Any) -> Any:
    config = workload.make_config(folder, batch=replace(batch, eval_batch_size=10))
    return workload.train(config, num_train=num_train, **options)


def test_one_row_is_trained(tmp_path: Path) -> None:
    result = train(tmp_path, 1, BatchConfig(per_device_batch_size=1), norm="batch")
    assert (result.state, result.position.optimizer_step) == ("done", 2)


@pytest.mark.parametrize(
    ("num_train", "num_test", "said"),
    [(0, 4, "0 training samples"), (4, 0, "a set without samples")],
)
def test_no_rows_are_refused_before_the_first_step(
    tmp_path: Path, num_train: int, num_test: int, said: str
) -> None:
    with pytest.raises(DataError, match=rf"DATA_TOO_SMALL.*{said}"):
        train(tmp_path / "run", num_train, BatchConfig(per_device_batch_size=1), num_test=num_test)
    assert not (tmp_path / "run").exists(), "no run was begun"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_norm_with_a_single_value_is_refused_at_the_start(
    tmp_path: Path, num_processes: int
) -> None:
    options: dict[str, Any] = {"num_processes": num_processes}
    job = processes.start(train_flat, tmp_path / "run", False, folder=tmp_path / "logs", **options)
    assert job.wait() == [64] * num_processes, job.output()
    assert re.search(
        r"error\[BATCH_SIZE\].* normalises over the batch.*--batch.drop-last", job.output()
    )
    assert not list(tmp_path.glob("run/checkpoints/step-*"))
    processes.run(train_flat, tmp_path / "mended", True, folder=tmp_path / "mended-logs", **options)


def train_flat(folder: Path, drop_last: bool) -> None:
    """17 samples in steps of 16."""
    workload.SmallNet = FlatNet  # type: ignore[misc]
    batch = BatchConfig(per_device_batch_size=8, global_batch_size=16, drop_last=drop_last)
    main(lambda _: train(folder, 17, batch), RecipeConfig, description="", argv=[])
