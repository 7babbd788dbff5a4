from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import (
    Callback,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainerConfig,
    start_run,
)
from accel_trainer.run.callbacks import build_callbacks


def names_of(
    folder: Path, *, run: Any = None, is_main: bool = True, savers: Any = (), **trainer: Any
) -> list[str]:
    """Return the classes of the callbacks that a config asks for."""
    config = RecipeConfig(
        trainer=TrainerConfig(**trainer),
        runtime=RuntimeConfig(num_threads=1),
        run=RunConfig(output_dir=folder, quiet=True, **(run or {})),
    )
    with start_run(config, recipe="recipe") as started:
        if not is_main:
            started = replace(started, accelerator=Other(started.accelerator))
        callbacks = build_callbacks(
            started,
            banner="",
            history=None,
            num_eval_samples=1,
            export_config={},
            onnx=None,
            savers=savers,
            callbacks=[Callback()],
        )
        return [type(callback).__name__ for callback in callbacks]


class Other:
    """The accelerator as another process than the main one sees it."""

    is_main_process = False

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


OF_MAIN = ["ProgressBar", "Exporter", "ResultWriter"]
# A row has what the user's hooks logged at its step.
LAST = ["Callback", "MetricLogger"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [*OF_MAIN, *LAST]),
        (
            {"patience": 2, "max_time_s": 60.0},
            ["EarlyStopping", "TimeLimit", *OF_MAIN, *LAST],
        ),
        ({"savers": ["model"]}, [*OF_MAIN, "PretrainedExport", *LAST]),
        ({"is_main": False, "patience": 2}, ["EarlyStopping", "ProgressBar", *LAST]),
    ],
)
def test_the_callbacks_of_a_run_are_those_that_its_config_asks_for(
    tmp_path: Path, settings: Any, expected: list[str]
) -> None:
    assert names_of(tmp_path, **settings) == expected
