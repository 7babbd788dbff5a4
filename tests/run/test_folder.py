from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator

from accel_trainer import BatchConfig, RecipeConfig, RunConfig
from accel_trainer.core.config import config_to_dict
from accel_trainer.core.errors import ConfigError, DivergedError, UserError
from accel_trainer.fault_tolerance.preemption import StopFlag
from accel_trainer.run.folder import OpenedFolder, open_folder
from accel_trainer.run.resume import Source
from tests.faults.tiny_run import name_at


def config_of(folder: Path, *, seed: int = 0, **run: object) -> RecipeConfig:
    return RecipeConfig(
        seed=seed,
        batch=BatchConfig(per_device_batch_size=8),
        run=RunConfig(output_dir=folder, **run),
    )


def opened(config: RecipeConfig, *, error: UserError | None = None) -> OpenedFolder:
    """Open the folder, and end the run, perhaps by an error."""
    flag = StopFlag()
    flag.is_starting = True
    with ExitStack() as lock:
        found = open_folder(
            config, "recipe", accelerator=Accelerator(cpu=True), stop_flag=flag, lock=lock
        )
        if error is not None:
            raise error
    return found


def earlier_run(folder: Path) -> bytes:
    """Make a folder with a checkpoint; return its config."""
    (folder / "checkpoints" / name_at(3)).mkdir(parents=True)
    config = replace(
        config_of(folder), batch=BatchConfig(per_device_batch_size=8, global_batch_size=32)
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    (folder / "metrics.jsonl").write_text('{"optimizer_step": 3}\n')
    return (folder / "config.yaml").read_bytes()


def test_a_new_folder_has_the_config_with_its_global_batch(tmp_path: Path) -> None:
    found = opened(config_of(tmp_path / "run"))
    assert (found.path, found.source) == (str(tmp_path / "run"), None)
    assert found.global_batch_size == 8
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert stored["batch"]["global_batch_size"] == 8
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["recipe_defaults"]["trainer"]["num_epochs"] == 10
    assert OpenedFolder(*json.loads(json.dumps(found))) == found, (
        "it is sent to the other processes"
    )


def test_a_folder_with_a_checkpoint_is_continued_with_its_global_batch(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    found = opened(config_of(tmp_path))
    assert found.source == Source(str(tmp_path))
    assert found.global_batch_size == 32


def test_a_folder_of_a_branch_begins_with_the_history_of_its_source(tmp_path: Path) -> None:
    earlier_run(tmp_path / "run")
    config = config_of(
        tmp_path / "branch", seed=1, resume=str(tmp_path / "run"), allow_change=("seed",)
    )
    found = opened(config)
    assert found.source == Source(str(tmp_path / "run"))
    assert (tmp_path / "branch" / "metrics.jsonl").read_text() == '{"optimizer_step": 3}\n'


def test_a_refused_change_leaves_the_folder_with_its_config(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    with pytest.raises(ConfigError, match="CONFIG_CHANGED.*seed: 0 -> 1"):
        opened(config_of(tmp_path, seed=1))
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_an_old_folder_has_its_config_again_if_the_run_is_refused_later(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    with pytest.raises(ConfigError, match="later"):
        opened(
            config_of(tmp_path, seed=1, allow_change=("seed",)), error=ConfigError("MODEL", "later")
        )
    assert (tmp_path / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "stays"), [(ConfigError("MODEL", "bad"), False), (DivergedError("NAN", "x"), True)]
)
def test_a_new_folder_is_removed_if_the_run_is_refused(
    tmp_path: Path, error: UserError, stays: bool
) -> None:
    with pytest.raises(type(error)):
        opened(config_of(tmp_path / "run"), error=error)
    assert (tmp_path / "run").exists() == stays


def test_half_written_files_of_a_killed_run_are_swept_from_its_folder(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "export").mkdir()
    half = [
        tmp_path / f".tmp-config.yaml-1-{0:019}",
        tmp_path / "export" / f".tmp-model.safetensors-1-{0:019}",
    ]
    for path in half:
        path.touch()
    opened(config_of(tmp_path))
    assert [path for path in half if path.exists()] == []
