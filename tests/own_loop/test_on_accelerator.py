"""A loop of one's own on an accelerator, whose tensors do not mix with those of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import exact_run, read_history
from tests import processes


def train_and_log(folder: Path, num_epochs: int) -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 2)
    loader = DataLoader(data, batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with exact_run(
        accelerator, folder, model=model, optimizer=optimizer, loader=loader, digest_every=2
    ) as run:
        for _ in run.epochs(num_epochs):
            for inputs, targets in run.batches():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log("loss", loss)
                run.log("tenth", 0.1)
            run.row(accuracy=0.5)


def test_a_loop_logs_tensors_of_a_device_and_resumes_there(tmp_path: Path) -> None:
    for number, num_epochs in enumerate((1, 2)):
        folder = tmp_path / f"logs-{number}"
        processes.run_on("pretend", train_and_log, tmp_path / "run", num_epochs, folder=folder)
    processes.run_on("pretend", train_and_log, tmp_path / "whole", 2, folder=tmp_path / "logs")
    rows, whole = ([*read_history(tmp_path / name)] for name in ("run", "whole"))
    assert rows == whole
    trained = [row for row in rows if row["event"] == "train"]
    assert [row["optimizer_step"] for row in trained] == [4, 8]
    # To the 36 bits of a sum that adds up exactly.
    assert [row["train/tenth"] for row in trained] == pytest.approx([0.1, 0.1], rel=2**-36)
