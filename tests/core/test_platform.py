"""One process trains with what Windows has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer import parse_config
from recipes import cifar

from .. import processes
from ..digits import ON_DIGITS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_platform_without_posix_names_trains_saves_resumes_and_locks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "tests.like_windows", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("TrainState", "error["))]
    assert [line.partition("optimizer_step=")[2][0] for line in said[:2]] == ["3", "5"]
    assert "continuing after step 3" in done.stdout
    assert said[2].startswith(f"error[LOCKED]: {tmp_path / 'run'} is locked by pid ")
    assert done.stdout.count("launched") == 2
    processes.run(train, tmp_path, folder=tmp_path / "logs")
    exports = [tmp_path / name / "export" / "model.safetensors" for name in ("run", "posix")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def train(folder: Path) -> None:
    flags = [
        *ON_DIGITS,
        "--runtime.num-threads",
        "1",
        "--output-dir",
        str(folder / "posix"),
        "--cache-dir",
        str(folder / "cache"),
        "--max-steps",
        "5",
    ]
    cifar.train(parse_config(cifar.Config, flags, description=""))
