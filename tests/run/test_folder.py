from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator

from accel_trainer import BatchConfig, RecipeConfig, RunConfig
from accel_trainer.core.config import config_to_dict
from accel_trainer.core.errors import ConfigError, DivergedError, UserError
from accel_trainer.run.folder import open_folder, record_start
from accel_trainer.run.provenance import defaults_of
from accel_trainer.run.resume import Source, choose_folder
from tests.faults.tiny_run import name_at


def config_of(folder: Path, *, seed: int = 0, **run: object) -> RecipeConfig:
    return RecipeConfig(
        seed=seed,
        batch=BatchConfig(per_device_batch_size=8),
        run=RunConfig(output_dir=folder, **run),
    )


def opened(
    config: RecipeConfig, *, error: UserError | None = None, is_accepted: bool = False
) -> tuple[str, Source | None]:
    """Open the folder, and end the run, perhaps by an error."""
    with ExitStack() as lock:
        found = open_folder(partial(choose_folder, config, "recipe"), config.run, lock)
        if is_accepted:
            recorded(config, Path(found[0]))
        if error is not None:
            raise error
    return found


def recorded(config: RecipeConfig, folder: Path) -> None:
    defaults = defaults_of(type(config))
    record_start(config_to_dict(config), Accelerator(cpu=True), folder, recipe_defaults=defaults)


def earlier_run(folder: Path) -> bytes:
    """Make a folder with a checkpoint; return its config."""
    (folder / "checkpoints" / name_at(3)).mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config_of(folder))))
    (folder / "metrics.jsonl").write_text('{"optimizer_step": 3}\n')
    return (folder / "config.yaml").read_bytes()


def test_a_new_folder_has_only_a_lock_until_the_start_is_accepted(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    assert opened(config) == (str(tmp_path / "run"), None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    recorded(config, tmp_path / "run")
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert stored["batch"]["per_device_batch_size"] == 8
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["recipe_defaults"]["trainer"]["num_epochs"] == 10


def test_an_old_folder_keeps_its_config_while_it_is_opened(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    _, source = opened(config_of(tmp_path, seed=1))
    assert source == Source(str(tmp_path))
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_folder_of_a_branch_has_no_rows_until_the_start_is_accepted(tmp_path: Path) -> None:
    earlier_run(tmp_path / "run")
    _, source = opened(config_of(tmp_path / "branch", resume=str(tmp_path / "run")))
    assert source == Source(str(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "branch").iterdir()] == ["run.lock"]


@pytest.mark.parametrize(
    ("error", "is_accepted", "stays"),
    [
        (ConfigError("MODEL", "bad"), False, False),
        (DivergedError("NAN", "x"), False, True),
        (ConfigError("MINE", "of a hook"), True, True),
    ],
)
def test_a_new_folder_is_removed_if_the_run_is_refused(
    tmp_path: Path, error: UserError, is_accepted: bool, stays: bool
) -> None:
    with pytest.raises(type(error)):
        opened(config_of(tmp_path / "run"), error=error, is_accepted=is_accepted)
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


@pytest.mark.parametrize("began", [{"resume": "runs/parent"}, {"init_from": Path("weights.st")}])
@pytest.mark.parametrize("again", [{}, {"resume": "runs/other"}])
def test_a_run_keeps_what_it_began_from(
    tmp_path: Path, began: dict[str, object], again: dict[str, object]
) -> None:
    """Else `rerun` would begin elsewhere, and find other weights."""
    earlier_run(tmp_path)
    first = config_to_dict(config_of(tmp_path, **began))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(first))
    recorded(config_of(tmp_path, seed=1, **again), tmp_path)
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (stored["run"], stored["seed"]) == (first["run"], 1)


def test_a_run_whose_config_was_removed_gets_a_new_one(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "config.yaml").unlink()
    recorded(config_of(tmp_path), tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 0
