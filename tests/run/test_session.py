"""Where a run starts from: its folder, an earlier attempt, another run."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from accel_trainer import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    OptimizerConfig,
    RunConfig,
    RunResult,
    start_run,
)
from accel_trainer.checkpoint.format import list_checkpoints

from .. import workload


def run(
    folder: Path | None, *, num_train: int = 72, max_steps: int | None = None, **changes: Any
) -> RunResult:
    config = workload.make_config(Path("unused"), checkpoint=CheckpointConfig())
    run_config = replace(config.run, output_dir=folder, **changes.pop("run", {}))
    config = replace(
        config, run=run_config, trainer=replace(config.trainer, max_steps=max_steps), **changes
    )
    return workload.train(config, num_train=num_train)


def export(folder: Path) -> bytes:
    return (folder / "export" / "model.safetensors").read_bytes()


def test_the_same_command_continues_its_run_and_a_finished_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, max_steps=4)
    run(tmp_path)
    assert "continuing after step 4" in capsys.readouterr().out
    before = (tmp_path / "result.json").read_bytes()
    run(tmp_path)
    assert "this run is finished" in capsys.readouterr().out
    assert (tmp_path / "result.json").read_bytes() == before


@pytest.mark.parametrize("is_folder_deleted", [False, True])
@pytest.mark.parametrize("num_starts", [1, 2])
def test_checkpoints_that_are_gone_are_named_once(
    tmp_path: Path, num_starts: int, is_folder_deleted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(num_starts):
        run(tmp_path, max_steps=4 + number)
    directory = tmp_path / "checkpoints"
    newest = list_checkpoints(directory)[-1]
    assert "is gone" not in caplog.text
    shutil.rmtree(directory)
    if not is_folder_deleted:
        directory.mkdir()
    result = run(tmp_path, max_steps=4)
    assert result.position.optimizer_step == 4
    (line,) = [each for each in caplog.messages if "is gone" in each]
    assert str(newest) in line
    caplog.clear()
    run(tmp_path, max_steps=5)
    assert "is gone" not in caplog.text


@pytest.mark.parametrize("seed", [5, 2**40 + 5])  # numpy accepts 32 bits
def test_a_run_begins_with_the_same_random_numbers_at_each_start(tmp_path: Path, seed: int) -> None:
    def draw(name: str, seed: int) -> tuple[float, float, float]:
        config = replace(workload.make_config(tmp_path / name), seed=seed)
        with start_run(config, recipe="drawing"):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw("first", seed)
    assert draw("second", seed) == first
    assert all(a != b for a, b in zip(draw("third", seed + 1), first, strict=True))


def test_a_shared_run_can_be_read_by_its_group(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run(tmp_path / "run", max_steps=2, run={"shared": True})
        assert os.umask(0o077) == 0o077, "the umask is that of before"
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))
    }
    assert modes.pop("run.lock") == 0o600
    assert {"checkpoints", "result.json", "model.safetensors"} <= set(modes)
    assert set(modes.values()) == {0o750, 0o640}


def test_without_a_folder_the_same_command_continues_its_unfinished_run(tmp_path: Path) -> None:
    runs = {"runs_dir": tmp_path}
    run(None, run=runs, max_steps=4)
    (tmp_path / next(tmp_path.iterdir()).name / "result.json").unlink()  # as after a kill
    run(None, run=runs)
    assert len(list(tmp_path.iterdir())) == 1
    run(None, run=runs)  # finished: a new one
    run(None, run=runs, seed=9)  # another config: a new one
    assert len(list(tmp_path.iterdir())) == 3


def test_a_changed_config_is_listed_with_the_flag_that_allows_it(tmp_path: Path) -> None:
    """Fault (Resume): a different config -> an error that lists each old and new value and the flag
    that allows the change
    """
    run(tmp_path, max_steps=4)
    changes = {"optimizer": OptimizerConfig(learning_rate=0.1), "seed": 4}
    with pytest.raises(ConfigError) as error:
        run(tmp_path, **changes)
    assert "seed: 3 -> 4; optimizer.learning_rate: 0.05 -> 0.1" in str(error.value)
    assert "allow_change=['seed', 'optimizer.learning_rate']" in str(error.value)
    result = run(tmp_path, run={"allow_change": ("seed", "optimizer.learning-rate")}, **changes)
    assert result.state == "done"


def test_initial_weights_that_a_run_did_not_start_from_are_not_ignored(tmp_path: Path) -> None:
    run(tmp_path / "before", max_steps=1)
    weights = {"init_from": tmp_path / "before" / "export" / "model.safetensors"}
    run(tmp_path / "own", max_steps=1)
    with pytest.raises(ConfigError, match="own has checkpoints of a run that started without it"):
        run(tmp_path / "own", max_steps=2, run=weights)
    for max_steps in (1, 2):
        run(tmp_path / "tuned", max_steps=max_steps, run=weights)


def test_other_data_is_refused_unless_allowed(tmp_path: Path) -> None:
    """Fault (Resume): different data -> an error, unless `--allow-change data`"""
    run(tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match="DATA_CHANGED"):
        run(tmp_path, num_train=73)
    assert run(tmp_path, num_train=73, run={"allow_change": ("data",)}).state == "done"


def test_a_run_branches_from_a_checkpoint_of_another_and_ends_the_same(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "start", max_steps=3)
    source = next((tmp_path / "start" / "checkpoints").glob("step-0000000003*"))
    run(tmp_path / "branch", run={"resume": str(source)}, max_steps=6)
    run(tmp_path / "branch", run={"resume": str(source)})  # its own checkpoints win
    assert export(tmp_path / "branch") == export(tmp_path / "whole")
    rows = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "branch")
    ]
    steps = [[(r["event"], r["optimizer_step"]) for r in map(json.loads, part)] for part in rows]
    assert steps[0] == steps[1]


def test_a_refused_change_leaves_the_stored_config_as_it_was(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "run", max_steps=3)
    stored = (tmp_path / "run" / "config.yaml").read_bytes()
    frozen = OptimizerConfig(learning_rate=0.05, freeze="layers.0")
    with pytest.raises(CheckpointError, match="optimizer has .* parameters.* init_from="):
        run(tmp_path / "run", run={"allow_change": ("optimizer.freeze",)}, optimizer=frozen)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == stored
    run(tmp_path / "run")
    assert export(tmp_path / "run") == export(tmp_path / "whole")


def test_damaged_checkpoints_never_mean_a_silent_start_from_scratch(tmp_path: Path) -> None:
    """Fault (Corruption): every checkpoint damaged -> exit 74, on every attempt; a run never
    silently starts from scratch
    """
    run(tmp_path, max_steps=4)
    for path in (tmp_path / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="CKPT_NONE_VALID"):
            run(tmp_path)


def test_a_damaged_newest_checkpoint_is_passed_over_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "hurt", max_steps=6)
    newest = max((tmp_path / "hurt" / "checkpoints").glob("step-*"))
    (newest / "optimizer.safetensors").write_bytes(b"")
    run(tmp_path / "hurt")
    assert f"skipping {newest.name}" in caplog.text
    assert export(tmp_path / "hurt") == export(tmp_path / "whole")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Fault (Signals and processes): two runs in one folder -> the second ends with exit code 73,
    "locked by pid ... since"
    """
    from accel_trainer.core.run_dir import run_lock

    from .. import processes

    with run_lock(tmp_path / "run.lock"):
        job = processes.run(run, tmp_path, folder=tmp_path / "logs", codes=[1])
        assert "is locked by pid" in job.output()


def test_the_resolved_config_is_saved_and_parses_back_equal(tmp_path: Path) -> None:
    from accel_trainer import RecipeConfig, load_config

    run(tmp_path, max_steps=1)
    saved = load_config(RecipeConfig, (tmp_path / "config.yaml").read_text())
    assert saved.batch.global_batch_size == 16
    expected = workload.make_config(tmp_path)
    assert saved.trainer.evaluate_every == "1epoch"
    assert replace(saved.trainer, max_steps=None, evaluate_every=None) == expected.trainer
    assert saved.run == RunConfig(output_dir=tmp_path)


@pytest.mark.parametrize("change", [{"weight_decay": 0.2}, {"momentum": 0.5}, {"nesterov": False}])
def test_what_is_allowed_to_change_changes(tmp_path: Path, change: dict[str, Any]) -> None:
    weights = {}
    for name, optimizer in (
        ("as before", OptimizerConfig()),
        ("changed", replace(OptimizerConfig(), **change)),
    ):
        run(tmp_path / name, max_steps=4, optimizer=OptimizerConfig())
        allowed = {"allow_change": tuple(f"optimizer.{field}" for field in change)}
        run(tmp_path / name, max_steps=5, optimizer=optimizer, run=allowed)
        weights[name] = newest_weights(tmp_path / name)
    assert weights["changed"] != weights["as before"]


def newest_weights(folder: Path) -> bytes:
    return (max((folder / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def test_a_resume_takes_the_settings_of_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4)
    path = tmp_path / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["seed"] = 9  # as an attempt leaves it that was killed before its first save
    path.write_text(yaml.safe_dump(stored))
    assert run(tmp_path, max_steps=5).position.optimizer_step == 5
    path.write_text("a: b: c")
    assert run(tmp_path).position.optimizer_step == 10
    assert yaml.safe_load(path.read_text())["seed"] == 3
