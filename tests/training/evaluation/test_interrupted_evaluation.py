"""A run that is interrupted around an evaluation within an epoch leaves what another one leaves."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import RecipeConfig
from tests.evaluated import (
    Interruption,
    differing,
    make_config,
    run_interrupted,
    run_whole,
    steps_of,
)
from tests.variants import slow_but

# Evaluations are due at steps 3, 6, 9, 12 and 15, saves at every 4th step and after each epoch of 5
# steps. Before the first step, a batch of each of the three sets is tried. An evaluation has 3
# batches of the first set and 2 of the second, or on each of two processes 2 and 1, and all of them
# twice: with the weights, and with their average.
MOMENTS = {
    "the step before an evaluation": ("step", 6),
    "an evaluation within an epoch": ("evaluation", 3 + 2),
    "its second set": ("evaluation", {1: 3 + 8, 2: 3 + 5}),
    "its row": ("result", 2),
    "the step after an evaluation": ("step", 7),
    "an evaluation with a save": ("result", 4),
    "the last evaluation": ("result", 5),
    "the final test": ("test", 1),
}


def config_of(folder: Path) -> RecipeConfig:
    return make_config(folder, ema_decay=0.8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an uninterrupted run on some number of processes leaves."""

    @cache
    def left(num_processes: int) -> Any:
        folder = tmp_path_factory.mktemp("whole") / "run"
        left = run_whole(config_of(folder), num_processes=num_processes)
        assert steps_of(folder) == [3, 6, 9, 12, 15]
        assert steps_of(folder, "test") == [15]
        return left

    return left


@pytest.mark.parametrize(
    ("moment", "signal", "num_processes"),
    slow_but(
        [
            ("an evaluation within an epoch", "TERM", 2),
            ("its second set", "TERM", 1),
            ("its row", "KILL", 1),
            ("the step after an evaluation", "KILL", 1),
            ("an evaluation with a save", "TERM", 1),
            ("the final test", "TERM", 1),
            ("the final test", "KILL", 2),
        ],
        [(moment, name, n) for moment in MOMENTS for name in ("TERM", "KILL") for n in (1, 2)],
    ),
)
def test_an_interruption_around_an_evaluation_changes_nothing(
    tmp_path: Path, whole: Any, moment: str, signal: str, num_processes: int
) -> None:
    called, call = MOMENTS[moment]
    number = call if isinstance(call, int) else call[num_processes]
    left = run_interrupted(
        config_of(tmp_path / "run"),
        Interruption(signal, called, number),
        num_processes=num_processes,
    )
    assert differing(left, whole(num_processes)) == []
