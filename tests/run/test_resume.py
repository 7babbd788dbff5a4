from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from accel_trainer import BatchConfig, RecipeConfig, RunConfig
from accel_trainer.checkpoint.format import LoadedCheckpoint
from accel_trainer.core.config import config_to_dict
from accel_trainer.core.errors import CheckpointError, ConfigError, OutputError
from accel_trainer.core.yaml_files import dump_yaml
from accel_trainer.run.config import decisive_values
from accel_trainer.run.resume import (
    Source,
    check_changes,
    choose_folder,
    continued,
    find_source,
    load_for_all,
    with_global_batch_size,
)
from tests.faults.tiny_run import is_state_at, make, name_at, save


def config_in(runs_dir: Path, **changes: Any) -> RecipeConfig:
    return replace(RecipeConfig(run=RunConfig(runs_dir=runs_dir)), **changes)


def make_run(folder: Path, config: RecipeConfig, *, state: str | None = None) -> Path:
    """Make the folder of a run with a checkpoint, and with a result if it has ended."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config_to_dict(config)))
    checkpointer = make(folder / "checkpoints", {"settings": decisive_values(config)})
    save(checkpointer, 3)
    checkpointer.close()
    if state is not None:
        (folder / "result.json").write_text(json.dumps({"state": state}))
    return folder


def test_the_folder_of_a_run_is_the_newest_unfinished_one_of_its_config(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    stored = with_global_batch_size(config, {}, num_processes=1)

    def folder(second: int, recipe: str = "net") -> Path:
        return tmp_path / f"{recipe}-20261127-12000{second}"

    make_run(folder(1), stored)
    newest = make_run(folder(2), stored, state="preempted")
    make_run(folder(3), stored, state="done")
    make_run(folder(4), replace(stored, seed=7))
    make_run(folder(5, "other"), stored)
    (folder(6) / "checkpoints").mkdir(parents=True)
    make_run(folder(7, "net-small"), stored)
    make_run(tmp_path / "net-20261127-120002-backup", stored)
    assert choose_folder(config, "net") == newest
    brackets = make_run(folder(8, "net[8]"), stored)
    assert choose_folder(config, "net[8]") == brackets


@pytest.mark.parametrize(
    ("begun", "given", "continues"),
    [
        ({}, {}, True),
        ({"init_from": Path("a")}, {"init_from": Path("a")}, True),
        ({"init_from": Path("a")}, {"init_from": Path("b")}, False),
        ({"init_from": Path("a")}, {}, False),
        ({}, {"init_from": Path("a")}, False),
        ({"resume": "runs/a"}, {"resume": "runs/a"}, True),
        ({"resume": "runs/a"}, {"resume": "runs/b"}, False),
        ({"resume": "runs/a"}, {}, True),
        ({"resume": "never"}, {}, True),
        ({}, {"resume": "runs/a"}, False),
    ],
)
def test_an_unfinished_run_is_continued_by_a_command_with_its_start(
    tmp_path: Path, begun: dict[str, Any], given: dict[str, Any], continues: bool
) -> None:
    """A branch is continued, and `--init-from` is not ignored."""

    def config(start: dict[str, Any]) -> RecipeConfig:
        return RecipeConfig(run=RunConfig(runs_dir=tmp_path, **start))

    stored = with_global_batch_size(config(begun), {}, num_processes=1)
    folder = make_run(tmp_path / "net-20261127-120001", stored)
    assert (choose_folder(config(given), "net") == folder) == continues


def test_an_allowed_change_does_not_begin_a_new_run(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    stored = with_global_batch_size(config, {}, num_processes=1)
    folder = make_run(tmp_path / "net-20261127-120000", replace(stored, seed=5))
    assert choose_folder(config, "net") != folder
    allowed = replace(config, run=replace(config.run, allow_change=("seed",)))
    assert choose_folder(allowed, "net") == folder


def test_the_folder_of_a_run_is_new_if_there_is_none_to_continue(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    make_run(tmp_path / "net-20261127-120000", with_global_batch_size(config, {}, num_processes=1))
    never = replace(config, run=replace(config.run, resume="never"))
    folder = choose_folder(never, "net")
    assert re.fullmatch(r"net-\d{8}-\d{6}", folder.name)
    assert choose_folder(replace(config, seed=1), "net").parent == tmp_path
    given = replace(config, run=replace(config.run, output_dir=tmp_path / "given"))
    assert choose_folder(given, "net") == tmp_path / "given"


def test_two_folders_of_the_same_second_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_trainer.run.resume.time.strftime", lambda form: "now")
    names = []
    for _ in range(3):
        folder = choose_folder(config_in(tmp_path), "net")
        folder.mkdir()
        names.append(folder.name)
    assert names == ["net-now", "net-now-1", "net-now-2"]


def test_a_run_resumes_from_its_own_checkpoints_before_those_of_another(tmp_path: Path) -> None:
    own = make_run(tmp_path / "own", RecipeConfig())
    other = make_run(tmp_path / "other", RecipeConfig())
    assert find_source(own, RunConfig(resume=str(other))) == Source(str(own))
    assert find_source(tmp_path / "new", RunConfig(resume=str(other))) == Source(str(other))
    checkpoint = other / "checkpoints" / name_at(3)
    assert find_source(tmp_path / "new", RunConfig(resume=str(checkpoint))) == Source(
        str(other), name_at(3)
    )
    assert find_source(tmp_path / "new", RunConfig()) is None


def test_a_run_does_not_go_back_to_an_older_checkpoint_of_its_own(tmp_path: Path) -> None:
    """It would continue from the newest, and overwrite what came after the older one."""
    folder = make_run(tmp_path / "own", RecipeConfig())
    checkpointer = make(folder / "checkpoints", {"settings": decisive_values(RecipeConfig())})
    save(checkpointer, 4)
    checkpointer.close()
    older, newest = (str(folder / "checkpoints" / name_at(step)) for step in (3, 4))
    with pytest.raises(OutputError, match=f"RUN_EXISTS.*--resume is {older}"):
        find_source(folder, RunConfig(resume=older))
    assert find_source(folder, RunConfig(resume=newest)) == Source(str(folder))
    assert find_source(tmp_path / "new", RunConfig(resume=older)) == Source(str(folder), name_at(3))


@pytest.mark.parametrize("kind", ["moved", "long", "loop"])
def test_what_cannot_be_branched_off_is_one_line(tmp_path: Path, kind: str) -> None:
    own = make_run(tmp_path / "own", RecipeConfig())
    paths = {"moved": tmp_path / name_at(3), "long": Path("x" * 300), "loop": tmp_path / "loop"}
    (own / "checkpoints" / name_at(3)).rename(paths["moved"])
    paths["loop"].symlink_to(paths["loop"])
    with pytest.raises(CheckpointError, match="CKPT_NOT_FOUND.*neither a checkpoint nor a run"):
        find_source(tmp_path / "new", RunConfig(resume=str(paths[kind])))


def test_a_run_does_not_resume_if_it_must_not_or_cannot(tmp_path: Path) -> None:
    own = make_run(tmp_path / "own", RecipeConfig())
    with pytest.raises(
        OutputError, match="has checkpoints, and --resume is never: choose a different folder"
    ):
        find_source(own, RunConfig(resume="never"))
    with pytest.raises(
        CheckpointError, match="--resume .*nothing is neither a checkpoint nor a run"
    ):
        find_source(tmp_path / "new", RunConfig(resume=str(tmp_path / "nothing")))


def checkpoint_with(settings: dict[str, Any] | None) -> LoadedCheckpoint:
    return LoadedCheckpoint("step-3", {} if settings is None else {"settings": settings}, {})


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ({"global_batch_size": 64}, {"batch.global_batch_size": 32}, 64),
        ({}, {"batch.global_batch_size": 32}, 32),
        ({}, {}, 48),
    ],
)
def test_a_resume_has_the_global_batch_that_is_given_stored_or_computed(
    given: dict[str, int], stored: dict[str, int], expected: int
) -> None:
    config = RecipeConfig(batch=BatchConfig(per_device_batch_size=8, accumulation_steps=2, **given))
    filled = with_global_batch_size(config, stored, num_processes=3)
    assert filled.batch.global_batch_size == expected


def test_a_resume_is_compared_with_what_its_checkpoint_was_trained_with() -> None:
    config = RecipeConfig(batch=BatchConfig(per_device_batch_size=8, accumulation_steps=4))
    size = {"batch.global_batch_size": 64}
    trained = decisive_values(with_global_batch_size(config, size, num_processes=1))
    source = Source("run")
    found = continued(config, checkpoint_with(trained), source, num_processes=2)
    assert found.batch.global_batch_size == 64
    with pytest.raises(ConfigError, match="CONFIG_CHANGED.*seed: 5 -> 0"):
        continued(config, checkpoint_with({**trained, "seed": 5}), source, num_processes=2)
    for found in (
        continued(config, checkpoint_with(None), source, num_processes=2),  # of an old version
        continued(config, None, None, num_processes=2),
    ):
        assert found.batch.global_batch_size == 64, "2 processes x 8 samples x 4 micro-batches"


def test_a_global_batch_that_the_processes_cannot_share_is_refused() -> None:
    config = RecipeConfig(batch=BatchConfig(per_device_batch_size=8, global_batch_size=24))
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        continued(config, None, None, num_processes=5)


def test_changed_settings_end_the_resume_unless_each_is_allowed() -> None:
    stored = decisive_values(RecipeConfig())
    batch = BatchConfig(global_batch_size=64)
    config = RecipeConfig(
        seed=4, batch=batch, run=RunConfig(allow_change=("batch.global-batch-size",))
    )
    with pytest.raises(
        ConfigError, match=r"run was made with a different config \(seed: 0 -> 4\)"
    ) as caught:
        check_changes(stored, config, Source("run"))
    assert "--allow-change seed" in str(caught.value)
    allowed = replace(config, run=RunConfig(allow_change=("seed", "batch.global_batch_size")))
    check_changes(stored, allowed, Source("run"))


@pytest.mark.parametrize(("name", "step"), [(None, 2), (name_at(1), 1)])
def test_the_checkpoint_to_resume_from_is_the_newest_or_the_named_one(
    tmp_path: Path, name: str | None, step: int
) -> None:
    accelerator = Accelerator(cpu=True)
    assert load_for_all(None, accelerator, timeout_s=1) is None
    checkpointer = make(tmp_path / "checkpoints")
    save(checkpointer, 1, 2)
    checkpointer.close()
    loaded = load_for_all(Source(str(tmp_path), name), accelerator, timeout_s=1)
    assert loaded is not None
    assert loaded.name == name_at(step)
    assert is_state_at(loaded.pieces, step)


def test_a_checkpoint_that_is_gone_when_the_resume_reads_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no valid checkpoint: restore one"):
        load_for_all(Source(str(tmp_path)), Accelerator(cpu=True), timeout_s=1)
