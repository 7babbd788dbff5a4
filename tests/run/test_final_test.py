"""The test set is evaluated once, at the end, with the weights that the run exports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    Evaluator,
    MeanLoss,
    OptimizerConfig,
    RunResult,
    TopKAccuracy,
    Trainer,
    TrainState,
    run_evaluation,
)
from accel_trainer.data.loader import build_eval_loader
from accel_trainer.distributed.accelerator import RuntimeConfig, start_accelerator
from tests import processes
from tests.evaluated import all_sets, left_by, make_config, make_net, rows_of, train
from tests.evaluated import test_set as points_of_test
from tests.joined import FSDP
from tests.optim.test_evaluation_weights import ScheduleFree

# The first evaluation is the best: its loss is the highest.
FIRST_IS_BEST = {"monitor": "eval/loss", "monitor_mode": "max"}


def measured_by_hand(weights: dict[str, Tensor]) -> dict[str, float]:
    """Return what an evaluation of the test set gives, apart from any run."""
    model = make_net()
    model.load_state_dict(weights)
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    loader = build_eval_loader(
        points_of_test(), BatchConfig(eval_batch_size=5), num_parts=1, accelerator=accelerator
    )
    evaluator = Evaluator(
        loader,
        task=ClassificationTask(),
        metrics=[MeanLoss(), TopKAccuracy()],
        accelerator=accelerator,
        seed=3,
    )
    found = run_evaluation(evaluator, model, accelerator)
    return {f"test/{name}": value for name, value in found.items()}


def of_test(result: RunResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if name.startswith("test/")}


def exported(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in {*one, *other})


@pytest.mark.parametrize("ema_decay", [None, 0.8])
def test_the_best_weights_are_tested_and_the_last_ones_come_back(
    tmp_path: Path, ema_decay: float | None
) -> None:
    last: dict[str, Tensor] = {}

    def fit(trainer: Trainer) -> RunResult:
        result = trainer.fit()
        last.update(trainer.model.state_dict())
        return result

    monitor = "eval/loss" if ema_decay is None else "eval_ema/loss"
    config = make_config(tmp_path, ema_decay=ema_decay, monitor=monitor, monitor_mode="max")
    result = train(config, test_set=points_of_test(), fit=fit)
    assert result.best is not None
    assert result.best.name == "step-0000000003-epoch-00000"
    best = exported(tmp_path)
    assert of_test(result) == measured_by_hand(best)
    stored = load_file(newest(tmp_path) / "model.safetensors")
    assert same(last, stored)
    assert not same(last, best)


def test_without_a_monitored_number_the_last_weights_are_tested(tmp_path: Path) -> None:
    class Count:
        """Numbers that cannot choose a checkpoint."""

        higher_is_better: dict[str, bool] = {}  # noqa: RUF012

        def empty(self, device: Any) -> Tensor:
            return torch.zeros(1, dtype=torch.float64, device=device)

        def update(self, sums: Tensor, batch: Any, output: Any) -> None:
            sums += output.losses.double().sum()

        def compute(self, sums: Tensor) -> dict[str, float]:
            return {"total": float(sums)}

    result = train(make_config(tmp_path), test_set=points_of_test(), metrics=[Count()])
    assert result.best is None
    expected = measured_by_hand(exported(tmp_path))["test/loss"] * 9
    assert of_test(result) == {"test/total": pytest.approx(expected, rel=1e-6)}


def test_a_finished_run_that_is_started_again_has_the_same_row_once(tmp_path: Path) -> None:
    train(make_config(tmp_path), test_set=points_of_test())
    left = left_by(tmp_path)
    assert len(rows_of(tmp_path, "test")) == 1
    for _ in range(2):
        train(make_config(tmp_path), test_set=points_of_test())
        assert left_by(tmp_path) == left


def test_a_run_that_stops_early_is_not_tested_before_it_is_complete(tmp_path: Path) -> None:
    def fit(trainer: Trainer) -> RunResult:
        with trainer.running() as reports:
            next(reports)
        assert trainer.result is not None
        return trainer.result

    result = train(make_config(tmp_path), test_set=points_of_test(), fit=fit)
    assert (result.state, of_test(result)) == ("stopped", {})
    assert rows_of(tmp_path, "test") == []
    assert of_test(train(make_config(tmp_path), test_set=points_of_test()))


def test_a_branch_without_the_best_checkpoint_tests_its_last_weights(
    tmp_path: Path,
) -> None:
    train(make_config(tmp_path / "run", max_steps=6, **FIRST_IS_BEST), test_set=points_of_test())
    config = make_config(tmp_path / "branch", resume=str(tmp_path / "run"), **FIRST_IS_BEST)
    result = train(config, test_set=points_of_test())
    assert result.best is not None
    assert not (tmp_path / "branch" / "checkpoints" / result.best.name).exists()
    assert of_test(result) == measured_by_hand(exported(tmp_path / "branch"))
    assert same(
        exported(tmp_path / "branch"), load_file(newest(tmp_path / "branch") / "model.safetensors")
    )


def test_a_schedule_free_optimizer_is_tested_with_its_evaluation_weights(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "optimizer": lambda model: ScheduleFree(model.parameters(), lr=0.05),
        "schedule": lambda step: 0.05,
    }
    trained: dict[str, Tensor] = {}

    def fit(trainer: Trainer) -> RunResult:
        result = trainer.fit()
        trained.update(trainer.model.state_dict())
        return result

    # The last evaluation is the best, and still training goes on with other weights.
    config = make_config(tmp_path, monitor="eval/loss", optimizer=OptimizerConfig())
    result = train(config, test_set=points_of_test(), fit=fit, **parts)
    assert of_test(result) == measured_by_hand(exported(tmp_path))
    assert not same(trained, exported(tmp_path))
    assert same(trained, load_file(newest(tmp_path) / "training_weights.safetensors"))


def sharded(folder: Path) -> None:
    os.environ.update(FSDP)
    result = train(make_config(folder, **FIRST_IS_BEST), test_set=points_of_test())
    assert result.position == TrainState(15, 3, 0, 114)


def test_shards_of_the_best_weights_are_tested_on_two_processes(tmp_path: Path) -> None:
    processes.run(sharded, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    left = left_by(tmp_path / "run")
    (row,) = rows_of(tmp_path / "run", "test")
    by_hand = measured_by_hand(exported(tmp_path / "run"))
    assert row["test/accuracy"] == by_hand["test/accuracy"]
    assert row["test/loss"] == pytest.approx(by_hand["test/loss"], rel=1e-6)
    processes.run(sharded, tmp_path / "run", num_processes=2, folder=tmp_path / "logs-again")
    assert left_by(tmp_path / "run") == left
    assert train_two_whole(tmp_path) == pytest.approx(row["test/loss"], rel=1e-4)


def train_two_whole(folder: Path) -> Any:
    """Return the loss on the test set of the same run with whole weights."""
    processes.run(whole, folder / "whole", num_processes=2, folder=folder / "logs-whole")
    return rows_of(folder / "whole", "test")[0]["test/loss"]


def whole(folder: Path) -> None:
    train(make_config(folder, **FIRST_IS_BEST), test_set=points_of_test())


def test_the_test_set_is_measured_once_and_not_with_the_evaluations(tmp_path: Path) -> None:
    train(make_config(tmp_path), **all_sets())
    assert all("test/loss" not in row for row in rows_of(tmp_path))
    assert [row["optimizer_step"] for row in rows_of(tmp_path, "test")] == [15]
