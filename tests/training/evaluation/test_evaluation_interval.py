"""`--evaluate-every`: at which steps a run evaluates, and what follows from each evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accel_trainer import Callback, RunResult, Trainer, TrainerConfig, TrainState
from tests.evaluated import make_config, rows_of, steps_of, train, train_set


def steps_due(every: str, *, steps_per_epoch: int, num_epochs: int) -> list[int]:
    """Return the steps after which a run evaluates."""
    config = TrainerConfig(evaluate_every=every, num_epochs=num_epochs)
    return [
        epoch * steps_per_epoch + step
        for epoch in range(num_epochs)
        for step in range(1, steps_per_epoch + 1)
        if config.evaluates_after(
            TrainState(epoch * steps_per_epoch + step, epoch, step), steps_per_epoch
        )
    ]


def test_fractions_that_floats_cannot_hold_miss_no_evaluation() -> None:
    steps = steps_due("0.1epochs", steps_per_epoch=10, num_epochs=30)
    assert steps == [*range(1, 301)]
    steps = steps_due("0.7epochs", steps_per_epoch=1000, num_epochs=70)
    assert steps == [*range(700, 70_001, 700)]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [3, 6, 9, 12, 15]),  # 15 steps, of which each fifth is short
        ({"max_steps": 7}, [3, 6, 7]),
        ({"evaluate_every": "0.5epochs"}, [3, 5, 8, 10, 13, 15]),
        ({"evaluate_every": "2epochs"}, [10, 15]),
        ({"batch": {"drop_last": True}}, [3, 6, 9, 12]),
        ({"batch": {"drop_last": True}, "evaluate_every": "0.5epochs"}, [2, 4, 6, 8, 10, 12]),
    ],
)
def test_a_run_has_a_row_for_each_evaluation(
    tmp_path: Path, changes: dict[str, Any], steps: list[int]
) -> None:
    train(make_config(tmp_path, **changes))
    assert steps_of(tmp_path) == steps
    before = [step for step in steps_of(tmp_path, "train")]
    assert set(steps) <= set(before)  # each evaluation follows a row of the steps before it


def test_the_interval_counts_epochs_of_the_new_plan_after_a_resume(tmp_path: Path) -> None:
    config = make_config(tmp_path, evaluate_every="0.5epochs", max_steps=5)
    train(config)
    assert steps_of(tmp_path) == [3, 5]
    config = replace(
        config,
        batch=replace(config.batch, global_batch_size=4),  # 10 steps in an epoch
        trainer=replace(config.trainer, max_steps=None),
        run=replace(config.run, allow_change=("batch.global_batch_size",)),
    )
    assert train(config).position.optimizer_step == 25
    assert steps_of(tmp_path) == [3, 5, 10, 15, 20, 25]


def losses_of(run: Path) -> list[float]:
    return [row["eval/loss"] for row in rows_of(run)]


def test_the_best_evaluation_within_an_epoch_is_kept_and_exported(tmp_path: Path) -> None:
    # The loss rises from step 2 on with the wrong direction: the first evaluation is the best.
    result = train(
        make_config(tmp_path, evaluate_every="2steps", monitor="eval/loss", monitor_mode="max")
    )
    losses = losses_of(tmp_path)
    assert max(losses) == losses[0]
    assert result.best is not None
    assert (result.best.name, result.best.value) == ("step-0000000002-epoch-00000", losses[0])
    assert json.loads((tmp_path / "checkpoints/best.json").read_text())["name"] == result.best.name
    exported = load_file(tmp_path / "export" / "model.safetensors")
    best = load_file(tmp_path / "checkpoints" / result.best.name / "model.safetensors")
    assert exported.keys() == best.keys()
    assert all(exported[name].equal(best[name]) for name in best)


def test_patience_counts_the_evaluations_within_epochs_and_stops_at_once(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "evaluate_every": "2steps",
        "monitor": "eval/loss",
        "monitor_mode": "max",
        "patience": 1,
    }
    result = train(make_config(tmp_path, **changes))
    assert result.stop_reason == "early stopping: no better evaluation in 1"
    assert result.position.optimizer_step == 4
    assert steps_of(tmp_path) == [2, 4]
    again = train(make_config(tmp_path, **changes))
    assert (again.position, steps_of(tmp_path)) == (result.position, [2, 4])


class Order(Callback):
    """Writes down the order of the hooks."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.events.append(f"step {report.optimizer_step}")

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        self.events.append("evaluation")

    def on_checkpoint(self, trainer: Any, name: str) -> None:
        self.events.append("save")

    def on_epoch_end(self, trainer: Any) -> None:
        self.events.append("epoch")


def test_a_save_that_is_due_with_an_evaluation_follows_it(tmp_path: Path) -> None:
    order = Order()
    config = make_config(tmp_path, every=2, num_epochs=1, evaluate_every="2steps", max_steps=4)
    train(config, callbacks=[order])
    assert order.events == [
        *("step 1", "step 2", "evaluation", "save"),
        *("step 3", "step 4", "evaluation", "save"),
    ]


def leave_at(step: int) -> Any:
    def fit(trainer: Trainer) -> RunResult:
        with trainer.running() as reports:
            for report in reports:
                if report.optimizer_step == step:
                    break
        assert trainer.result is not None
        return trainer.result

    return fit


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_loop_that_is_left_around_an_evaluation_continues_with_it(
    tmp_path: Path, step: int
) -> None:
    train(make_config(tmp_path / "whole"))
    left = train(make_config(tmp_path / "parts"), fit=leave_at(step))
    assert left.state == "stopped"
    train(make_config(tmp_path / "parts"))
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "parts", "train") == rows_of(tmp_path / "whole", "train")


def test_evaluating_more_often_changes_no_weight(tmp_path: Path) -> None:
    for every in ("1step", "3epochs"):
        train(
            make_config(tmp_path / every, every=None, evaluate_every=every), train_set=train_set()
        )
    newest = [
        load_file(max((tmp_path / every / "checkpoints").glob("step-*")) / "model.safetensors")
        for every in ("1step", "3epochs")
    ]
    assert all(newest[0][name].equal(newest[1][name]) for name in newest[0])
