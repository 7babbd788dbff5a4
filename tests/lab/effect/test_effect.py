"""`accel-trainer diff --effect` names the settings that change the result of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from accel_trainer.checkpoint.format import list_checkpoints
from tests.cli.conftest import run_command
from tests.lab.replay.conftest import NAMED, Train

pytestmark = pytest.mark.usefixtures("python_is_forked")

CHANGES = {
    "optimizer.learning_rate": 0.06,
    "schedule.milestones": [0.5, 0.9],
    "schedule.power": 2.0,  # not of this shape
    "trainer.max_time_s": 1e6,
}


@pytest.fixture(scope="module")
def pair(train_poisoned: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 20 steps, and the same with other settings in its config."""
    first = train_poisoned("--epochs", "1", "--schedule.shape", "step")
    second = tmp_path_factory.mktemp("runs") / "second"
    shutil.copytree(first, second)
    config = yaml.safe_load((second / "config.yaml").read_text())
    for name, value in CHANGES.items():
        group, _, last = name.partition(".")
        config[group][last] = value
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    return first, second


def test_what_changes_the_result_is_told_from_what_does_later_or_never(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["diff", *pair, "--effect", "--until", 8, "--jobs", 2, "--json"]
    code, out, err = run_command(capsys, argv)
    assert (code, err) == (0, NAMED)
    found = json.loads(out)
    effects = {effect["names"][0]: effect for effect in found["effects"]}
    assert effects["optimizer.learning_rate"]["step"] == 1
    assert {"model", "optimizer"} & {*effects["optimizer.learning_rate"]["parts"]}
    assert effects["schedule.milestones"]["step"] == 16
    assert effects["schedule.milestones"]["parts"] == ["learning rate"]
    assert found["nothing"] == ["schedule.power"]
    assert found["no_part"] == ["trainer.max_time_s"]
    assert found["repeats_second"] is False  # its rows are those of the first run


def test_a_step_that_was_never_trained_is_one_line(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(capsys, ["diff", *pair, "--effect", "--until", 1000])
    assert (code, "error[STEP]" in err, "has no step 1000" in err) == (64, True, True)


def test_settings_of_a_branch_are_tried_from_where_it_began(
    train_poisoned: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = train_poisoned("--max-steps", "45")
    first = train_poisoned("--resume", list_checkpoints(base / "checkpoints")[-1])
    second = shutil.copytree(first, tmp_path / "second")
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["optimizer"]["learning_rate"] = 0.06
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    code, out, err = run_command(capsys, ["diff", first, second, "--effect", "--json"])
    assert code == 0, err
    (effect,) = json.loads(out)["effects"]
    assert (effect["names"], effect["step"]) == (["optimizer.learning_rate"], 46)


def test_runs_with_the_same_settings_need_no_training(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_command(capsys, ["diff", pair[0], pair[0], "--effect"])
    assert code == 0
    assert out.startswith("no setting that affects the training differs\n")
