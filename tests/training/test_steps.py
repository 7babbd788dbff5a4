"""A run whose length is given in steps, in place of epochs. An epoch has 5 steps here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import ConfigError, RecipeConfig, TrainerConfig
from accel_trainer.checkpoint.format import list_checkpoints
from accel_trainer.optim.lr_scheduler import ScheduleConfig
from accel_trainer.run.config import with_defaults
from tests.evaluated import (
    differing,
    make_config,
    rows_of,
    run_whole,
    steps_of,
    train,
)
from tests.training.test_position import Witness, positions


def config_of(folder: Path, num_steps: int | None = 12, **changes: Any) -> RecipeConfig:
    config = make_config(folder, **{"num_epochs": None, "num_steps": num_steps} | changes)
    return replace(config, schedule=ScheduleConfig(shape="linear"))


@pytest.mark.parametrize("num_steps", [3, 10, 12])
def test_a_run_ends_after_its_steps_with_the_end_of_the_schedule(
    tmp_path: Path, num_steps: int
) -> None:
    """Within the first epoch, at the end of one, and within the third."""
    result = train(config_of(tmp_path / "run", num_steps), task=Witness(tmp_path / "seen"))
    assert (result.stop_reason, result.state) == ("num_steps reached", "done")
    assert result.position.optimizer_step == num_steps
    assert steps_of(tmp_path / "run") == sorted({*range(3, num_steps + 1, 3), num_steps})
    last = rows_of(tmp_path / "run", "train")[-1]
    assert last["optim/learning_rate"] == pytest.approx(0.05 / num_steps)
    seen = positions(tmp_path / "seen", "step")
    assert seen == [(step, step // 5, step / num_steps) for step in range(num_steps)]
    assert positions(tmp_path / "seen", "evaluation")[-1][2] == 1.0


def test_each_evaluation_of_such_a_run_is_in_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, every=7)
    names = []
    train(replace(config, checkpoint=replace(config.checkpoint, keep_last_n=99)))
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    steps = [int(name.split("-")[1]) for name in names]
    assert steps == [3, 5, 6, 7, 9, 10, 12]  # epochs end after 5 and 10


def test_a_stop_before_the_last_step_changes_neither_schedule_nor_rows(tmp_path: Path) -> None:
    whole = run_whole(config_of(tmp_path / "whole"))
    run_whole(config_of(tmp_path / "parts", max_steps=4))
    run_whole(config_of(tmp_path / "parts", max_steps=11))
    parts = run_whole(config_of(tmp_path / "parts"))
    weights = [name for name in whole if name.startswith(("export/", "checkpoints/step-"))]
    assert weights
    assert [name for name in differing(whole, parts) if name in weights] == []


def test_a_resume_changes_the_steps_only_on_purpose(tmp_path: Path) -> None:
    train(config_of(tmp_path, 4))
    with pytest.raises(ConfigError, match=r"CONFIG_CHANGED.*trainer.num_steps: 4 -> 12"):
        train(config_of(tmp_path))
    result = train(config_of(tmp_path, allow=("trainer.num_steps",)))
    assert result.position.optimizer_step == 12
    assert steps_of(tmp_path) == [3, 4, 6, 9, 12]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_steps": 5, "num_epochs": 3}, "epochs=3 and steps=5 both set the length"),
        ({"num_steps": 5, "num_epochs": 0}, "epochs=0 and steps=5 both set the length"),
        ({"num_steps": -1}, "trainer.num_steps is -1: set it to at least 0"),
    ],
)
def test_a_length_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainerConfig(**changes)


def test_epochs_and_steps_have_intervals_of_their_own_by_default() -> None:
    """Steps of 1000, in which any run is evaluated and saved soon."""
    by_epochs = with_defaults(RecipeConfig())
    assert (by_epochs.trainer.num_epochs, by_epochs.trainer.evaluate_every) == (10, "1epoch")
    assert by_epochs.checkpoint.every_n_steps is None
    by_steps = with_defaults(RecipeConfig(trainer=TrainerConfig(num_steps=9)))
    assert (by_steps.trainer.num_epochs, by_steps.trainer.evaluate_every) == (None, "1000steps")
    assert by_steps.checkpoint.every_n_steps == 1000
    assert with_defaults(by_steps) == by_steps
