"""A short soak holds what it held early; a run that keeps a little of every step is found out."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import IO

import pytest

from accel_trainer import Callback, StepReport, Trainer
from tests import processes
from tests.faults import soak

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_grows_with_the_steps_of_a_run(tmp_path: Path, num_workers: int) -> None:
    job = processes.run(soak_for, 1000, num_workers, folder=tmp_path, has_workers=True)
    assert "nothing grew by more than" in job.output().splitlines()[-1]


def soak_for(num_steps: int, num_workers: int) -> None:
    # The data workers fork, or each would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    raise SystemExit(soak.main(["--steps", str(num_steps), "--num-workers", str(num_workers)]))


class Hoarder(Callback):
    """Keeps 100 KiB of every step, and an open file of every hundredth."""

    def __init__(self) -> None:
        self.memory: list[bytes] = []
        self.files: list[IO[str]] = []

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.memory.append(b"x" * 100 * 1024)
        if report.optimizer_step % 100 == 0:
            self.files.append(open(__file__))  # noqa: SIM115


def test_what_grows_is_reported(tmp_path: Path) -> None:
    job = processes.run(soak_with_a_hoarder, tmp_path, folder=tmp_path / "logs")
    assert "rss_mib grew from" in job.output()
    assert "open_files grew from" in job.output()
    assert "threads grew" not in job.output()


def soak_with_a_hoarder(folder: Path) -> None:
    rows = soak.rows_of(soak.train(folder / "run", 500, Hoarder()))
    print("\n".join(soak.what_grew(rows)))
