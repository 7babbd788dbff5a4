"""What a callback logs itself, in the rows of real runs: whole, killed, and continued."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ConfigError,
    RecipeConfig,
    RunResult,
    StepReport,
    Trainer,
    TrainerConfig,
    main,
    read_history,
)
from accel_trainer.callbacks.progress_bar import ProgressBar
from accel_trainer.vision import to_png

from .. import processes, workload
from ..checkpoint.sharded_run import KINDS

Row = dict[str, Any]


def value_at(step: int) -> float:
    return step / 7


def picture_at(step: int) -> Tensor:
    return torch.full((3, 4, 5), step / 10)


class LogsAll(Callback):
    """Logs in every hook, on every process, and kills the main process after a step."""

    def __init__(self, dies_after: int = 0) -> None:
        self._dies_after = dies_after

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        step = report.optimizer_step
        is_main = trainer.accelerator.is_main_process
        trainer.log("value", torch.tensor(value_at(step)) if is_main else 1e9)
        if step % 2:
            trainer.log.picture("mine/square", to_png(picture_at(step)))
        if step == self._dies_after:
            trainer._checkpointer.wait(must_succeed=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluate_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        trainer.log("evaluated", trainer.state.optimizer_step)


def attempt(
    folder: Path, dies_after: int = 0, max_steps: int | None = None, every_n_steps: int = 4
) -> None:
    """Train 2 epochs of 5 steps, with a row after every third, and at the end of an epoch.

    There is a checkpoint after every step, so that most have pending values.
    """
    config = workload.make_config(folder, checkpoint=CheckpointConfig(every_n_steps=1))
    config = replace(
        config,
        batch=BatchConfig(global_batch_size=16, eval_batch_size=10),
        trainer=replace(
            config.trainer, log_every_n_steps=every_n_steps, ema_decay=None, max_steps=max_steps
        ),
    )
    workload.train(config, callbacks=(LogsAll(dies_after),))


def rows_of(folder: Path) -> list[Row]:
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_history(folder)
    ]


def own_values(row: Row) -> Row:
    groups = ("log", "mine")
    return {name: value for name, value in row.items() if name.partition("/")[0] in groups}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    processes.run(attempt, folder, folder=folder.parent / "logs")
    return folder


def mean_of(*steps: int) -> float:
    total = 0.0
    for step in steps:
        total += float(torch.tensor(value_at(step)))
    return total / len(steps)


def test_a_row_has_what_was_logged_up_to_its_step(whole: Path) -> None:
    rows = rows_of(whole)
    train = {row["optimizer_step"]: own_values(row) for row in rows if row["event"] == "train"}
    assert list(train) == [4, 5, 8, 10]
    assert train[4]["log/value"] == mean_of(1, 2, 3, 4)
    assert train[5]["log/value"] == mean_of(5)
    assert train[8]["log/value"] == mean_of(6, 7, 8)
    assert train[10]["log/value"] == mean_of(9, 10)
    assert train[8]["mine/square"] == {"picture": "pictures/mine=square-step-0000000007.png"}
    assert [own_values(row) for row in rows if row["event"] == "eval"] == [{}, {}]


def test_what_an_evaluation_logs_is_in_the_next_row_or_in_a_last_one(whole: Path) -> None:
    found = [
        (row["event"], row["optimizer_step"], row["log/evaluated"])
        for row in rows_of(whole)
        if "log/evaluated" in row
    ]
    assert found == [("train", 8, 5.0), ("log", 10, 10.0)]


def test_the_pictures_of_a_run_lie_in_its_folder(whole: Path) -> None:
    steps = (1, 3, 5, 7, 9)
    assert {path.name: path.read_bytes() for path in (whole / "pictures").iterdir()} == {
        f"mine=square-step-{step:010d}.png": to_png(picture_at(step)) for step in steps
    }


def test_a_finished_run_that_is_started_again_has_the_same_rows(
    tmp_path: Path, whole: Path
) -> None:
    found = []
    for number, max_steps in enumerate((3, 3, None, None)):
        logs = tmp_path / f"logs-{number}"
        processes.run(attempt, tmp_path / "run", 0, max_steps, folder=logs)
        found.append(rows_of(tmp_path / "run"))
    assert found[0] == found[1]
    assert found[0][0]["log/evaluated"] == 3.0, "evaluated as it stopped, before its row"
    assert found[2] == found[3] == rows_of(whole)


def test_own_numbers_are_shown_with_the_others(tmp_path: Path) -> None:
    job = processes.run(attempt, tmp_path / "run", folder=tmp_path / "logs")
    (line,) = (line for line in job.output().splitlines() if "step 5/10  loss" in line)
    assert f"  log value {value_at(5):.4g}  " in line
    assert "mine/square" not in job.output()


def test_a_last_row_without_a_number_prints_nothing(tmp_path: Path) -> None:
    class LogsLast(Callback):
        def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
            trainer.log.picture("last", to_png(picture_at(1)))

    bar = ProgressBar(TrainerConfig(num_epochs=1), banner="", is_quiet=False)
    shown: list[str] = []
    bar.write = shown.append  # type: ignore[method-assign]
    workload.train(workload.make_config(tmp_path / "run"), callbacks=(LogsLast(),))
    row = rows_of(tmp_path / "run")[-1]
    assert (row["event"], list(own_values(row))) == ("log", ["log/last"])
    bar.show(row)
    assert shown == []


def test_a_loop_of_ones_own_can_log_too(tmp_path: Path) -> None:
    def loop(trainer: Trainer) -> RunResult:
        with trainer.running() as reports:
            for report in reports:
                trainer.log("loop", report.optimizer_step)
        assert trainer.result is not None
        return trainer.result

    config = workload.make_config(tmp_path / "run")
    workload.train(config, fit=loop)
    logged = [row["log/loop"] for row in rows_of(tmp_path / "run") if "log/loop" in row]
    assert logged[0] == 1.5
    assert logged[-1] == max(row["optimizer_step"] for row in rows_of(tmp_path / "run"))


class LogsShards(Callback):
    """Logs a number of sharded weights, whole or as they are."""

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        weight: Any = next(trainer.model.parameters()).detach()
        trainer.log("weights", (weight.full_tensor() if self._is_whole else weight).norm())


def train_shards(folder: Path, is_whole: bool) -> None:
    os.environ.update(KINDS["sharded"])
    config = workload.make_config(folder)
    main(
        lambda _: workload.train(config, callbacks=(LogsShards(is_whole),)),
        RecipeConfig,
        description="",
        argv=[],
    )


def test_a_shard_is_not_logged_and_no_process_waits(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = processes.run(train_shards, tmp_path / "run", False, folder=logs, codes=[64, 64])
    said = "log/weights is of type DTensor: it is a shard, so call full_tensor() on all processes"
    assert said in job.output().splitlines()[-1]


def test_whole_tensors_of_shards_are_logged(tmp_path: Path) -> None:
    run, logs = tmp_path / "run", tmp_path / "logs"
    processes.run(train_shards, run, True, num_processes=2, folder=logs)
    assert rows_of(run)[0]["log/weights"] > 0


def test_a_name_of_the_engine_ends_the_run_in_one_line(tmp_path: Path) -> None:
    class Wrong(Callback):
        def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
            trainer.log("train/loss", 1.0)

    with pytest.raises(ConfigError, match="nothing can be logged as 'train/loss': give letters"):
        workload.train(workload.make_config(tmp_path / "run"), callbacks=(Wrong(),))
