"""What happens to a run whose folder, disk or processes are not what they should be."""

from __future__ import annotations

import errno
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import (
    Callback,
    OptimizerConfig,
    ScheduleConfig,
    StepReport,
    Trainer,
)
from accel_trainer.cli.recipe.main import main
from accel_trainer.core.errors import ExitCode
from accel_trainer.run.config import RecipeConfig
from tests import processes, workload
from tests.faults.disks import NamingDisk, installed
from tests.programs.left import left_by


class AtStep(Callback):
    """Calls `act` after a step."""

    def __init__(self, step: int, act: object) -> None:
        self._step = step
        self._act = act

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step == self._step:
            self._act()


def exit_code(folder: Path, *callbacks: Callback) -> int:
    """The exit code of a command that trains in `folder`."""

    def train(config: RecipeConfig) -> object:
        return workload.train(
            workload.make_config(folder, run=replace(config.run, output_dir=folder)),
            callbacks=callbacks,
        )

    with pytest.raises(SystemExit) as raised:
        main(train, RecipeConfig, description="a run", argv=[])
    assert isinstance(raised.value.code, int)
    return int(raised.value.code)


@pytest.mark.parametrize("what", ["", "checkpoints"])
def test_a_run_folder_that_disappears_ends_the_run_and_stays_away(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Disk): output folder disappears, is moved, or is replaced by a different folder, even
    a different run's -> exit 74 at the next row or save; the folder is not created again, and
    nothing is written to or removed from the folder that has taken its place. The same command
    with the new path continues the run
    """
    folder = tmp_path / "run" / what
    unmount = AtStep(4, lambda: folder.rename(tmp_path / "gone"))
    assert exit_code(tmp_path / "run", unmount) == ExitCode.CHECKPOINT
    assert "the folder is gone" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_no_room_for_a_checkpoint_ends_the_run_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_trainer.checkpoint.manager.free_bytes", lambda path: 40)
    steps: list[int] = []
    assert exit_code(tmp_path / "run", AtStep(1, lambda: steps.append(1))) == ExitCode.CHECKPOINT
    assert "error[CKPT_PREFLIGHT]" in capsys.readouterr().err
    assert steps == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    processes.run(train, folder, folder=folder.with_name("logs"))
    return folder


def train(folder: Path) -> None:
    workload.train(workload.make_config(folder))


class FailingAt(NamingDisk):
    """A disk that is full for one change."""

    def __init__(self, folder: Path, failing: tuple[str, str, int]) -> None:
        super().__init__(folder)
        self._failing = failing

    def meet(self, change: tuple[str, str, int], act: Any, act_half: Any) -> Any:
        if change != self._failing:
            return act()
        act_half()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("kind", "path", "nth", "num_warnings"),
    [
        ("write", "metrics.jsonl", 1, 1),
        ("write", "metrics.jsonl", 3, 1),
        ("sync", "metrics.jsonl", 2, 1),
        ("write", "checkpoints/.tmp-step-0000000004-epoch-00000/model.safetensors", 2, 1),
        ("rename", "checkpoints/.tmp-step-0000000004-epoch-00000", 1, 1),
        ("rename", "checkpoints/.tmp-best.json", 1, 1),
    ],
)
def test_a_disk_that_is_full_for_a_moment_costs_a_warning_and_no_row(
    tmp_path: Path,
    kind: str,
    path: str,
    nth: int,
    num_warnings: int,
    whole: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "starved"
    with installed(FailingAt(folder, (kind, path, nth))):
        assert workload.train(workload.make_config(folder)).state == "done"
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == num_warnings
    assert left_by(folder) == left_by(whole)


def test_a_folder_reached_by_a_symlink_is_resolved_once_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault (Disk): output folder is reached through a symlink -> resolved once at the start and
    printed; a symlink inside a checkpoint is an error
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")

    def point_elsewhere() -> None:
        link.unlink()
        link.symlink_to(tmp_path / "other")

    assert exit_code(link, AtStep(4, point_elsewhere)) == ExitCode.DONE
    assert f"run folder {tmp_path / 'real'}" in capsys.readouterr().out
    assert (tmp_path / "real" / "result.json").exists()
    assert list((tmp_path / "other").iterdir()) == []


def test_processes_with_other_versions_are_named_before_a_file_is_written(tmp_path: Path) -> None:
    """Fault (Resume): versions, code, data or config differ between processes -> an error on all
    processes that lists the differences, before anything is written
    """
    job = processes.run(
        train_differently, tmp_path / "run", folder=tmp_path / "logs", codes=[1, 1, 1]
    )
    for rank in range(3):
        said = job.output(rank)
        assert (
            "PROCESSES_DIFFER]: not the same as on process 0: torch on 2; code on 1; config on 1, 2"
            in said
        )
        assert "(seed: 1; process 0: seed: 0). Install" in said
    assert not (tmp_path / "run").exists()


def train_differently(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if rank == 1:
        sys.argv = [str(Path(__file__))]
    if rank == 2:
        torch.__version__ = "99.0"  # type: ignore[assignment]
    workload.train(workload.make_config(folder, seed=min(rank, 1)))


def test_processes_with_other_data_are_named_before_the_first_step(tmp_path: Path) -> None:
    job = processes.run(
        train_on_other_data, tmp_path / "run", folder=tmp_path / "logs", codes=[1, 1]
    )
    assert "PROCESSES_DIFFER]: not the same as on process 0: data on 1" in job.output(0)
    assert not (tmp_path / "run").exists()


def train_on_other_data(folder: Path) -> None:
    workload.train(workload.make_config(folder), num_train=72 + int(os.environ["RANK"]))


@pytest.mark.parametrize(
    ("part", "difference"),
    [
        ("model", "model on 1 (layers.1.running_mean float32 [8]; process 0: nothing)"),
        ("optimizer", "optimizer on 1 (class 'Adam'; process 0: class 'SGD')"),
        ("metrics", "metrics on 1 (MeanLoss; process 0: TopKAccuracy)"),
        ("schedule", "schedule on 1 (step 0: 0.1; process 0: step 0: 0.2)"),
        ("max_steps", "config on 1 (trainer.max_steps: 4; process 0: trainer.max_steps: None)"),
    ],
)
def test_processes_that_build_other_parts_are_named_before_the_first_step(
    tmp_path: Path, part: str, difference: str
) -> None:
    job = processes.start(
        build_another, tmp_path / "run", part, num_processes=2, folder=tmp_path / "logs"
    )
    codes = job.wait()
    assert "error[PROCESSES_DIFFER]: not the same as on process 0: " in job.output(0), codes
    assert difference in job.output(0)
    assert codes == [ExitCode.USAGE] * 2
    assert not (tmp_path / "run").exists()


def build_another(folder: Path, part: str) -> None:
    """Train, where the second process has another `part`."""
    is_other = os.environ["RANK"] == "1"
    if part == "metrics" and is_other:
        workload.TopKAccuracy = workload.MeanLoss  # type: ignore[misc, assignment]

    def train(config: RecipeConfig) -> object:
        config = workload.make_config(folder, run=replace(config.run, output_dir=folder))
        if part == "max_steps" and is_other:
            config = replace(config, trainer=replace(config.trainer, max_steps=4))
        if part == "schedule":
            config = replace(
                config, schedule=ScheduleConfig(), optimizer=OptimizerConfig(learning_rate=None)
            )
        if part == "optimizer":
            config = replace(config, optimizer=OptimizerConfig())
        return workload.train(
            config,
            norm="batch" if part == "model" and is_other else "group",
            optimizer=(sgd, adam)[is_other] if part == "optimizer" else None,
            schedule=(lambda step: 0.2 - 0.1 * is_other) if part == "schedule" else None,
        )

    main(train, RecipeConfig, description="a run", argv=[])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["file", "checkpoint", "run"])
def test_a_new_run_starts_with_the_weights_of_another_and_nothing_else(
    tmp_path: Path, kind: str, whole: Path
) -> None:
    newest = max((whole / "checkpoints").glob("step-*"))
    source = {"file": newest / "ema.safetensors", "checkpoint": newest, "run": whole}[kind]
    started: list[dict[str, torch.Tensor]] = []

    class Look(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            assert (trainer.state.optimizer_step, trainer.best) == (0, None)
            momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
            assert not any(momentum.any() for momentum in momenta)
            started.append(
                {name: value.clone() for name, value in trainer.model.state_dict().items()}
            )

    config = workload.make_config(tmp_path / "second")
    config = replace(config, run=replace(config.run, init_from=source))
    workload.train(config, callbacks=(Look(),))
    from safetensors.torch import load_file

    expected = load_file(newest / "ema.safetensors")  # the averaged weights are the ones to use
    assert all(torch.equal(started[0][name], value) for name, value in expected.items())
