"""A recorded run of 60 tiny steps, for the commands that train a part of it again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--epochs 3 --batch-size 8 --lr 0.05 --runtime.num-threads 1 --quiet"
    " --trainer.max-grad-norm 1 --trainer.log-every-n-steps 4 --trainer.digest-every-n-steps 8"
    " --checkpoint-every-n-steps 15 --checkpoint.keep-for-replay 9"
)
RECIPE = ROOT / "tests" / "lab" / "replay" / "poisoned.py"
NAMED = f"note: running {RECIPE}\n"
"""What commands that train it again print on stderr before they do."""
Train = Callable[..., Path]


@pytest.fixture(scope="session")
def train_poisoned(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> Train:
    """Train `poisoned.py` with more flags, and callbacks from a file; return the run folder."""

    def train(*flags: object, callbacks: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "run"
        command = [one_that_forks, RECIPE, *FLAGS.split(), "--output-dir", folder, *flags]
        added = {"ACCEL_TRAINER_CALLBACKS": str(callbacks)} if callbacks else {}
        subprocess.run(
            [str(word) for word in command], cwd=ROOT, check=True, env={**os.environ, **added}
        )
        return folder

    return train


@pytest.fixture(scope="session")
def poisoned(train_poisoned: Train) -> Path:
    """The folder of a finished run: 3 epochs of 20 steps, checkpoints after each 15 steps."""
    return train_poisoned()
