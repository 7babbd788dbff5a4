"""What users bring fails, on one process of two as well: the job ends at once and names it."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from accel_trainer import (
    MeanLoss,
    RecipeConfig,
    main,
)
from tests import processes, workload


def train(folder: Path, metric: type[MeanLoss] = MeanLoss) -> None:
    workload.MeanLoss = metric  # type: ignore[misc]
    config = workload.make_config(folder, checkpoint=workload.CheckpointConfig())
    main(lambda _: workload.train(config, dropout=0.1), RecipeConfig, description="", argv=[])


class Unreadable(workload.Bars):
    """Samples of which one process cannot read one any more once it trains."""

    def __init__(self, split: Any, rank: int) -> None:
        super().__init__(split)
        self._rank = rank
        self._num_read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._num_read += 1
        if self._num_read == 75 and os.environ["RANK"] == str(self._rank):
            raise OSError("cut\nshort")
        return super().__getitem__(index)


def train_on_unreadable(folder: Path, rank: int, num_workers: int) -> None:
    # The data workers fork, or each would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    workload.Bars = lambda split: Unreadable(split, rank)  # type: ignore[assignment, misc]
    config = workload.make_config(folder)
    main(
        lambda _: workload.train(config, num_workers=num_workers),
        RecipeConfig,
        description="",
        argv=[],
    )


@pytest.mark.parametrize(("rank", "num_workers"), [(0, 0), (1, 0), (1, 1)])
def test_a_bad_sample_of_one_process_ends_both_and_is_named(
    tmp_path: Path, rank: int, num_workers: int
) -> None:
    arguments = (tmp_path / "run", rank, num_workers)
    job = processes.run(
        train_on_unreadable, *arguments, folder=tmp_path / "logs", has_workers=True, codes=[65, 65]
    )
    said = job.output().splitlines()[-1]
    assert "cannot be read (OSError: cut short, at tests/faults/test_user_code.py:" in said
    assert "in __getitem__): fix it" in said
    assert said.startswith(
        "accel_trainer: error[DATA_SAMPLE]: sample "
        if rank == 0
        else "accel_trainer: error[PROCESS]: rank 1, step 1, training: sample "
    )
    assert "Traceback" not in job.output(), "no bug"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 65)
