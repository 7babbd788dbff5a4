"""A run whose folder is moved, replaced or deleted ends and touches no files of others."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from accel_trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    OutputError,
    StepReport,
    Trainer,
)
from accel_trainer.cli.recipe.main import main
from accel_trainer.core.errors import DataError, ExitCode
from accel_trainer.run.config import RecipeConfig
from tests import processes, workload


class AtStep(Callback):
    """Calls `act` on the main process after a step, or before the first one."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step = step
        self._act = act

    def on_fit_start(self, trainer: Trainer) -> None:
        self._act_at(0, trainer)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self._act_at(report.optimizer_step, trainer)

    def _act_at(self, step: int, trainer: Trainer) -> None:
        if step == self._step and trainer.accelerator.is_main_process:
            self._act()


def train(
    folder: Path, step: int, act: Callable[[], None], every_n_steps: int | None = None
) -> None:
    """A command that trains in `folder`, and acts after a step."""

    def run(config: RecipeConfig) -> object:
        checkpoint = CheckpointConfig(every_n_steps=every_n_steps)
        config = workload.make_config(
            folder, checkpoint=checkpoint, run=replace(config.run, output_dir=folder)
        )
        return workload.train(config, callbacks=(AtStep(step, act),))

    main(run, RecipeConfig, description="a run", argv=[])


def files_of_others(folder: Path) -> None:
    """Make a folder with files of others, of which some have names that a run uses."""
    for name in (
        "thesis.txt",
        "config.yaml",
        "metrics.jsonl",
        "run.lock",
        "checkpoints/best.json",
        "logs/rank-00000.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of others")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def put_another_in_place(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    files_of_others(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def delete_and_make_another(folder: Path) -> None:
    """Delete a folder and make another.

    On many file systems it gets the old inode number, unless somebody has the old folder open.
    """
    shutil.rmtree(folder)
    files_of_others(folder)


class Act:
    """`act(folder)`, for a process that is started."""

    def __init__(self, act: Callable[[Path], None], folder: Path) -> None:
        self._act = act
        self._folder = folder

    def __call__(self) -> None:
        self._act(self._folder)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("act", [put_another_in_place, delete_and_make_another])
def test_a_folder_that_took_the_place_of_a_runs_is_left_as_it_is(
    tmp_path: Path, act: Callable[[Path], None], step: int, num_processes: int
) -> None:
    folder = tmp_path / "run"
    job = processes.run(
        train,
        folder,
        step,
        Act(act, folder),
        folder=tmp_path / "logs",
        codes=[ExitCode.CHECKPOINT] * num_processes,
    )
    output = "".join(job.output(rank) for rank in range(num_processes))
    assert output.count("error[RUN_FOLDER]: the folder is gone, and there is a") == 1
    assert f"{folder} in its place" in output
    assert "Traceback" not in output
    assert "another machine" not in output
    files_of_others(tmp_path / "expected")
    assert content(folder) == content(tmp_path / "expected")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_moved_folder_is_not_made_again_and_the_run_resumes_where_it_is(
    tmp_path: Path, num_processes: int
) -> None:
    folder = tmp_path / "run"
    job = processes.run(
        train,
        folder,
        6,
        Act(move, folder),
        2,
        folder=tmp_path / "logs",
        codes=[ExitCode.CHECKPOINT] * num_processes,
    )
    assert f"the folder is gone: there is no {folder}" in job.output(0)
    assert not folder.exists()
    processes.run(
        train_whole, tmp_path / "moved", num_processes=num_processes, folder=tmp_path / "logs-2"
    )
    processes.run(
        train_whole, tmp_path / "whole", num_processes=num_processes, folder=tmp_path / "logs-3"
    )
    name = "export/model.safetensors"
    assert content(tmp_path / "moved")[name] == content(tmp_path / "whole")[name]


def train_whole(folder: Path) -> None:
    workload.train(workload.make_config(folder, checkpoint=CheckpointConfig(every_n_steps=2)))


class MoveAndWait:
    """Moves the folder, and waits for `go` beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> None:
        move(self._folder)
        while not (self._folder.with_name("go")).exists():
            time.sleep(0.05)


def test_a_run_with_a_moved_folder_does_not_write_into_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = processes.start(train, folder, 3, MoveAndWait(folder), folder=tmp_path / "logs")
    while not (tmp_path / "moved").exists():
        time.sleep(0.05)
    processes.run(train_whole, folder, folder=tmp_path / "logs-2")
    before = content(folder)
    (tmp_path / "go").touch()
    assert first.wait() == [ExitCode.CHECKPOINT]
    assert content(folder) == before


def test_two_runs_whose_lock_was_deleted_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def start_another() -> None:
        (folder / "run.lock").unlink()
        processes.run(train_whole, folder, folder=tmp_path / "logs")

    with pytest.raises(SystemExit) as raised:
        train(folder, 3, start_another, every_n_steps=1)
    assert raised.value.code == ExitCode.CHECKPOINT
    assert (folder / "result.json").exists()


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_run_that_has_begun_removes_nothing_when_it_ends_with_an_error(
    tmp_path: Path, step: int
) -> None:
    def fail() -> None:
        raise DataError("PHOTO", "a photo is damaged: repair it")

    with pytest.raises(SystemExit) as raised:
        train(tmp_path / "run", step, fail)
    assert raised.value.code == ExitCode.DATA
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_start_that_is_refused_takes_back_only_what_it_has_written(tmp_path: Path) -> None:
    def refuse() -> nn.Module:
        (tmp_path / "run" / "notes.txt").write_text("of others")
        raise ConfigError("MODEL", "the model does not fit the data: correct it")

    def run(_: RecipeConfig) -> object:
        return workload.train(workload.make_config(tmp_path / "run"), net=refuse)

    with pytest.raises(SystemExit) as raised:
        main(run, RecipeConfig, description="a run", argv=[])
    assert raised.value.code == ExitCode.USAGE
    assert content(tmp_path / "run") == {"notes.txt": b"of others"}


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "export/config.json",
        "export/model.onnx",
        "export/pretrained/thesis.txt",
        "trackers/tensorboard/thesis.txt",
        "checkpoints/best.json",
        "logs/rank-0.json",
    ],
)
def test_a_folder_with_files_that_a_run_would_overwrite_is_refused(
    tmp_path: Path, name: str
) -> None:
    """Fault (Disk): output folder contains files that are not the run's -> exit 73 if the run would
    overwrite one; all others are counted in a note at the start and left alone, even if the
    start fails, and when old checkpoints are deleted
    """
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text("of others")
    with pytest.raises(
        OutputError,
        match=f"{name.replace('board/thesis.txt', 'board')} would be overwritten, and the fol",
    ):
        workload.train(workload.make_config(tmp_path))
    assert content(tmp_path) == {name: b"of others"}


def test_a_folder_with_other_files_of_others_is_used_and_they_stay(tmp_path: Path) -> None:
    names = ["thesis.txt", "logs/slurm.out", ".tmp-notes-2024-01", "checkpoints/readme"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of others")
    workload.train(workload.make_config(tmp_path))
    assert [(tmp_path / name).read_text() for name in names] == ["of others"] * len(names)


def test_checkpoints_of_another_run_in_place_of_a_runs_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    # The writer's thread may look between the two changes of the folder.
    said = "the folder is gone(: there is no .*checkpoints|, and there is a different .*points)"
    with pytest.raises(CheckpointError, match=said):
        workload.train(
            workload.make_config(tmp_path / "run"),
            callbacks=(AtStep(4, lambda: put_another_in_place(folder)),),
        )
    files_of_others(tmp_path / "expected")
    assert content(folder) == content(tmp_path / "expected")
    assert os.listdir(folder.with_name("moved"))
