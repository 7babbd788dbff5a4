"""Ctrl-C and `sys.exit` in a loop of one's own: each says what happens next, and what is lost."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import exact_run
from accel_trainer.core.errors import ExitCode
from tests import processes


def fit_interrupted(folder: Path, interrupt: Callable[[], object], is_late: bool) -> None:
    """Interrupt the sixth step, or what follows the epoch in which that is."""
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_once_saved() -> None:
        if run.step not in (5, 8):
            return
        while not [*folder.glob("checkpoints/step-0000000004-*/COMMIT")]:
            time.sleep(0.01)
        interrupt()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=2)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    with exact_run(Accelerator(cpu=True), folder, **parts, save_every=4) as run:
        for _ in run.epochs(2):
            for (inputs,) in run.batches():
                if not is_late:
                    interrupt_once_saved()
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if is_late:
                interrupt_once_saved()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def press_twice() -> None:
    press()
    press()


@pytest.mark.parametrize(("is_late", "saved"), [(False, 6), (True, 8)])
def test_ctrl_c_in_a_loop_says_how_to_leave_and_how_to_go_on(
    is_late: bool, saved: int, tmp_path: Path
) -> None:
    arguments = (tmp_path / "run", press, is_late)
    codes = [ExitCode.PREEMPTED]
    job = processes.run(fit_interrupted, *arguments, folder=tmp_path / "logs", codes=codes)
    pressed, last = (line for line in job.output().splitlines() if line)
    assert "press again" in pressed
    assert f"saved step {saved}: run the same command" in last


@pytest.mark.parametrize(("is_late", "lost"), [(False, 1), (True, 4)])
def test_a_second_ctrl_c_in_a_loop_says_what_is_lost(
    is_late: bool, lost: int, tmp_path: Path
) -> None:
    arguments = (tmp_path / "run", press_twice, is_late)
    codes = [128 + signal.SIGINT]
    job = processes.run(fit_interrupted, *arguments, folder=tmp_path / "logs", codes=codes)
    last = job.output().splitlines()[-1]
    assert f"losing {lost} step" in last
    assert "run the same command" in last


@pytest.mark.parametrize("is_late", [False, True])
def test_an_exit_from_a_loop_is_no_silent_end(is_late: bool, tmp_path: Path) -> None:
    arguments = (tmp_path / "run", sys.exit, is_late)
    job = processes.start(fit_interrupted, *arguments, folder=tmp_path / "logs")
    assert job.wait() != [0]
    assert "the same command continues it" in job.output().splitlines()[-1]
    processes.run(fit_interrupted, tmp_path / "run", list, True, folder=tmp_path / "again")
