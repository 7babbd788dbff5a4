"""A start that a command has made: what it changes in a recipe, and what it leaves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import RecipeConfig, main
from accel_trainer.cli.common.processes import environment_of
from accel_trainer.cli.recipe.start import Start, this_start
from accel_trainer.cli.recipe.train_as import train_as
from accel_trainer.core import filesystem
from accel_trainer.lab.chaos.disk import FAULTY_DISK
from accel_trainer.run.extra_callbacks import START_VARIABLE
from accel_trainer.run.folder import MOVED_FOLDERS

SHORT = Start(
    recipe="recipe.py",
    changes={"run.output_dir": "there", "run.track": [], "trainer.log_every_n_steps": 1},
    defaults={"runtime.num_threads": 1},
    until=10,
    resume="auto",
)


class Seen(Exception):
    """Ends a run before it begins."""


def config_after(monkeypatch: pytest.MonkeyPatch, *flags: str) -> RecipeConfig:
    """Return the config with which `main` trains as `SHORT` says."""
    configs: list[RecipeConfig] = []

    def train(config: RecipeConfig) -> Any:
        configs.append(config)
        raise Seen

    monkeypatch.setenv(START_VARIABLE, json.dumps(asdict(SHORT)))
    with pytest.raises(SystemExit):
        main(train, RecipeConfig, description="", argv=flags)
    (config,) = configs
    return config


def test_a_start_changes_settings_whatever_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--output-dir", "here", "--track", "wandb", "--resume", "never", "--dry-run")
    config = config_after(monkeypatch, *flags)
    run = config.run
    assert (run.output_dir, run.track, run.resume) == (Path("there"), (), "auto")
    assert (config.trainer.log_every_n_steps, config.trainer.max_steps) == (1, 10)
    assert config.runtime.num_threads == 1


def test_flags_may_train_less_branch_off_and_choose_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--max-steps", "4", "--resume", "runs/a", "--runtime.num-threads", "2")
    config = config_after(monkeypatch, *flags)
    assert (config.trainer.max_steps, config.run.resume) == (4, "runs/a")
    assert config.runtime.num_threads == 2


def test_a_start_without_changes_is_only_its_command() -> None:
    plain = Start(recipe="recipe.py", flags=["--lr", "1"], variables={"A": "1"})
    inherited = {START_VARIABLE: "of the process that starts it", "PATH": "/bin"}
    assert environment_of(plain, inherited) == {"PATH": "/bin", "A": "1", MOVED_FOLDERS: "{}"}
    assert environment_of(SHORT, inherited)[START_VARIABLE] == json.dumps(asdict(SHORT))


def test_a_start_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_start() is None
    monkeypatch.setenv(START_VARIABLE, environment_of(SHORT, {})[START_VARIABLE])
    assert this_start() == Start(**json.loads(json.dumps(asdict(SHORT))))


def test_the_disk_of_a_fault_is_there_only_while_the_recipe_trains(tmp_path: Path) -> None:
    disks: list[filesystem.Disk] = []

    def train(config: RecipeConfig) -> Any:
        disks.append(filesystem.disk)

    before = filesystem.disk
    fault = {"kind": "write", "step": 0, "value": 5}
    changes = {"run.output_dir": str(tmp_path)}
    start = Start(recipe="recipe.py", changes=changes, disk=(FAULTY_DISK, fault))
    train_as(start, train, RecipeConfig())
    assert vars(disks[0])["num_left"] == 5
    assert filesystem.disk is before
