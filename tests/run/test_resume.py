from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn

from accel_trainer import BatchConfig, Callback, RecipeConfig, RunConfig
from accel_trainer.callbacks.metrics_file import MetricsFile
from accel_trainer.checkpoint.format import LoadedCheckpoint
from accel_trainer.core.config import config_to_dict
from accel_trainer.core.errors import CheckpointError, ConfigError, OutputError
from accel_trainer.core.logger import main_speaks
from accel_trainer.core.yaml_files import dump_yaml
from accel_trainer.run.config import decisive_values, training_changes
from accel_trainer.run.resume import (
    Resume,
    Source,
    advise_flags,
    allowed_names,
    begin_history,
    choose_folder,
    continued,
    find_source,
    load_for_all,
    with_global_batch_size,
)
from accel_trainer.training.progress import EVALUATION
from tests import workload
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
    with pytest.raises(OutputError, match="has checkpoints, and --resume is never"):
        find_source(own, RunConfig(resume="never"))
    with pytest.raises(CheckpointError, match="--resume .*nothing is neither a checkpoint nor"):
        find_source(tmp_path / "new", RunConfig(resume=str(tmp_path / "nothing")))


def resume_with(manifest: Mapping[str, Any], run: RunConfig | None = None) -> Resume:
    checkpoint = LoadedCheckpoint("step-3", manifest, {"model": {}})
    return Resume(Source("run"), checkpoint, allowed_names(run or RunConfig()), advise_flags)


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
    found = continued(config, resume_with({"settings": trained}), num_processes=2)
    assert found.batch.global_batch_size == 64
    with pytest.raises(ConfigError, match="CONFIG_CHANGED.*seed: 5 -> 0"):
        continued(config, resume_with({"settings": {**trained, "seed": 5}}), num_processes=2)
    for found in (
        continued(config, resume_with({}), num_processes=2),  # of an old version
        continued(config, None, num_processes=2),
    ):
        assert found.batch.global_batch_size == 64, "2 processes x 8 samples x 4 micro-batches"


def test_a_global_batch_that_the_processes_cannot_share_is_refused() -> None:
    config = RecipeConfig(batch=BatchConfig(per_device_batch_size=8, global_batch_size=24))
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        continued(config, None, num_processes=5)


@pytest.mark.parametrize(("name", "step"), [(None, 2), (name_at(1), 1)])
def test_the_checkpoint_to_resume_from_is_the_newest_or_the_named_one(
    tmp_path: Path, name: str | None, step: int
) -> None:
    accelerator = Accelerator(cpu=True)
    checkpointer = make(tmp_path / "checkpoints")
    save(checkpointer, 1, 2)
    checkpointer.close()
    loaded = load_for_all(Source(str(tmp_path), name), accelerator, timeout_s=1)
    assert loaded.name == name_at(step)
    assert is_state_at(loaded.pieces, step)


def test_a_checkpoint_that_is_gone_when_the_resume_reads_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no valid checkpoint: restore one"):
        load_for_all(Source(str(tmp_path)), Accelerator(cpu=True), timeout_s=1)


# --- what a checkpoint is compared with, and applied to ---

CONFIG = RecipeConfig(seed=3)
NOW: Mapping[str, Any] = {
    "num_samples": [72, 37],
    "data_fingerprint": "sampled:" + "1" * 64,
    "eval_fingerprint": "sampled:" + "5" * 64,
    "order": "3" * 64,
    "settings": decisive_values(CONFIG),
    "task_fingerprint": "task",
    "versions": {"torch": "2.13.0"},
    "num_processes": 2,
    "num_threads": 4,
    "reduce": "float",
}


def compared(*, allowed: Sequence[str] = (), **stored: Any) -> Sequence[str]:
    """Return how a start of now differs from a manifest that differs in what was `stored`."""
    manifest = {name: value for name, value in {**NOW, **stored}.items() if value is not None}
    config = replace(CONFIG, run=RunConfig(allow_change=(*allowed, "seed", "batch.order")))
    resume = resume_with(manifest, config.run)
    if "settings" in manifest:
        resume.compare_settings(training_changes(manifest["settings"], config))
    resume.compare(NOW)
    return resume.changes


def test_a_checkpoint_of_the_same_data_is_restored_with_the_changes() -> None:
    assert compared() == []
    assert compared(settings={**NOW["settings"], "seed": 2}) == ["seed"]
    older = {name: value for name, value in NOW["settings"].items() if name != "seed"}
    assert compared(settings=older) == ["seed"], "its default was another"
    unknown = dict.fromkeys(("settings", "num_samples", "order", "data_fingerprint"))
    assert compared(**unknown, task_fingerprint=None) == [], "a manifest without them"


@pytest.mark.parametrize(
    "evaluated",
    [
        {"num_samples": [72, 36]},
        {"num_samples": [72, 37, 5]},
        {"eval_fingerprint": "sampled:" + "6" * 64},
        {"eval_fingerprint": ""},
        {"eval_fingerprint": None},  # of an older version
    ],
)
def test_numbers_of_other_evaluation_data_do_not_count(evaluated: dict[str, Any]) -> None:
    stored = {"data_fingerprint": "sampled:" + "2" * 64, **evaluated}
    assert compared(allowed=["data"], **stored) == ["data", EVALUATION]


def test_a_checkpoint_of_another_task_is_not_restored() -> None:
    with pytest.raises(CheckpointError, match="TASK_CHANGED"):
        compared(task_fingerprint="other")


@pytest.mark.parametrize(
    ("stored", "warned"),
    [
        ({}, ""),
        ({"num_processes": 1}, "num_processes 1 -> 2"),
        ({"num_threads": 8}, "num_threads 8 -> 4"),
        ({"num_threads": None}, ""),  # of a version that did not record them
        (
            {"versions": {"torch": "2.8.0"}, "num_processes": 1},
            "torch 2.8.0 -> 2.13.0, num_processes 1 -> 2",
        ),
    ],
)
def test_a_checkpoint_of_other_versions_is_restored_with_a_warning(
    stored: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        compared(**stored)
        with main_speaks(False):  # the main process has said it
            compared(**stored)
    expected = [
        f"changed since step-3 was saved: {warned}; the results may differ in the last bits"
    ]
    assert caplog.messages == (expected if warned else [])


@pytest.mark.parametrize(
    "error", [KeyError("momentum"), RuntimeError("mine"), CheckpointError("CKPT_STATE", "named")]
)
def test_a_checkpoint_that_cannot_be_restored_is_one_line(error: Exception) -> None:
    def load(pieces: Mapping[str, Any]) -> None:
        raise error

    is_content = isinstance(error, KeyError)
    with pytest.raises(CheckpointError if is_content else type(error)) as caught:
        resume_with({}).apply(load, nn.Module())
    if is_content:
        said = "step-3 contains state that this run cannot load (KeyError: 'momentum', at "
        assert str(caught.value).startswith(f"error[CKPT_STATE]: {said}")
        assert str(caught.value).endswith("): use another checkpoint")
    else:
        assert caught.value is error


def test_a_checkpoint_is_loaded_once_and_its_memory_is_freed() -> None:
    resume = resume_with({})
    loaded: list[dict[str, Any]] = []
    resume.apply(lambda pieces: loaded.append({**pieces}), nn.Module())
    assert loaded == [{"model": {}}]
    assert resume.checkpoint.pieces == {}


@pytest.mark.parametrize(
    ("source", "rows"),
    [(None, ""), ("run", "left by an attempt\n"), ("other", "of the other\n")],
)
def test_a_run_begins_with_the_rows_of_what_it_continues(
    tmp_path: Path, source: str | None, rows: str
) -> None:
    """They are written once nothing is refused any more, whatever was found in the folder."""
    for name, text in (("run", "left by an attempt\n"), ("other", "of the other\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    folder = tmp_path / "run"
    resume = source and replace(resume_with({}), source=Source(str(tmp_path / source)))
    with closing(MetricsFile(folder / "metrics.jsonl")) as history:
        history.kept_bytes = len(rows)  # as the checkpoint has it
        begin_history(history, folder, resume or None)
    assert (folder / "metrics.jsonl").read_text() == rows


@pytest.mark.parametrize("kind", ["missing", "link"])
def test_a_branch_of_a_run_without_rows_is_one_line(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if kind == "link":
        (other / "metrics.jsonl").symlink_to(tmp_path / "rows")
        (tmp_path / "rows").touch()
    resume = replace(resume_with({}), source=Source(str(other)))
    with (
        closing(MetricsFile(tmp_path / "metrics.jsonl")) as history,
        pytest.raises(CheckpointError, match="RUN_HISTORY"),
    ):
        begin_history(history, tmp_path, resume)


class Refusing(Callback):
    """Has a state that it does not take back."""

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError(f"{state['number']} is not wanted")


def test_a_branch_that_a_callback_refuses_drops_no_rows(tmp_path: Path) -> None:
    """They are of an attempt that was killed before its first checkpoint."""
    other, folder = tmp_path / "other", tmp_path / "run"
    workload.train(workload.make_config(other), callbacks=(Refusing(),))
    folder.mkdir()
    (folder / "run.lock").touch()
    (folder / "metrics.jsonl").write_bytes(rows := b'{"event": "train"}\n')
    config = workload.make_config(folder, run=RunConfig(output_dir=folder, resume=str(other)))
    with pytest.raises(CheckpointError, match="CKPT_STATE"):
        workload.train(config, callbacks=(Refusing(),))
    assert (folder / "metrics.jsonl").read_bytes() == rows
