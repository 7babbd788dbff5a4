"""Loops in the cells of a notebook: the kernel is killed, and the cells run again in a new one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import processes
from tests.own_loop.kills import left_by

CELLS = (
    """
import os, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from accel_trainer import exact_run
torch.set_num_threads(1)
""",
    """
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
parts = dict(model=model, optimizer=optimizer, loader=loader, states=states, save_every=1)
if keeps:
    states["schedule"] = schedule
""",
    """
with exact_run(accelerator, folder, **parts) as run:
    for _ in run.epochs(2):
        for (inputs,) in run.batches():
            if run.step == killed_at:
                os.kill(os.getpid(), 9)
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log("loss", loss)
        run.row()
""",
)


def run_cells(folder: Path, killed_at: int | None, keeps: bool) -> None:
    """Run them as a kernel does."""
    shell = pytest.importorskip("IPython").InteractiveShell.instance()
    shell.user_ns.update(folder=folder, killed_at=killed_at, keeps=keeps, states={})
    for cell in CELLS:
        shell.run_cell(cell, store_history=True).raise_error()


def in_a_kernel(folder: Path, killed_at: int | None = None, *, keeps: bool = True) -> str:
    logs = folder.with_suffix(".logs")
    job = processes.run(
        run_cells,
        folder,
        killed_at,
        keeps,
        folder=logs,
        codes=[0 if killed_at is None else -signal.SIGKILL],
    )
    return job.output()


@pytest.mark.crash
def test_cells_go_on_in_a_new_kernel_as_if_nothing_had_happened(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    assert "LOOP_STATE" not in in_a_kernel(tmp_path / "whole")
    in_a_kernel(tmp_path / "killed", killed_at=8)
    in_a_kernel(tmp_path / "killed")
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


@pytest.mark.slow
def test_what_a_cell_forgets_is_named(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    said = in_a_kernel(tmp_path / "run", keeps=False)
    assert "[LOOP_STATE] the loop changes schedule" in said
