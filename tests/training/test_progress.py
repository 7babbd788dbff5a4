from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.train_state import BestCheckpoint, TrainState
from accel_trainer.core.types import Position
from accel_trainer.fault_tolerance.preemption import TIME_LIMIT, Stop, StopFlag
from accel_trainer.training.config import TrainerConfig
from accel_trainer.training.progress import Progress, choose_monitor

NOTHING = Stop()


class Named:
    """An evaluation that declares its numbers and measures nothing."""

    def __init__(self, **monitors: bool) -> None:
        self.monitors = monitors

    def run(self, model: nn.Module, position: Position, stop_flag: StopFlag) -> dict[str, Any]:
        return {}


LOSS = Named(loss=False)
ACCURACY = Named(accuracy=True)
BOTH = Named(loss=False, accuracy=True)


def make(**config: Any) -> Progress:
    return Progress(TrainerConfig(**config), {"eval": LOSS})


def evaluate(progress: Progress, step: int, loss: float | None) -> None:
    progress.state = TrainState(step)
    progress.record_evaluation({"eval/loss": loss}, f"step-{step}")


def test_the_best_evaluation_is_the_lowest_loss_and_the_first_of_equals() -> None:
    progress = make()
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.3), (4, 0.9)):
        evaluate(progress, step, loss)
    assert progress.best == BestCheckpoint("step-2", "eval/loss", 0.3, "min")
    assert progress.metrics == {"eval/loss": 0.9}


def test_the_best_evaluation_is_the_highest_value_if_the_config_says_so() -> None:
    progress = make(monitor_mode="max")
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.9)):
        evaluate(progress, step, loss)
    assert progress.best == BestCheckpoint("step-3", "eval/loss", 0.9, "max")


def test_an_evaluation_without_a_number_is_never_the_best() -> None:
    progress = make()
    for value in (math.nan, None, math.inf, -math.inf):
        assert progress.record_evaluation({"eval/loss": value}, "step-1") == "eval/loss"
    assert progress.best is None, "no manifest can hold it"
    assert progress.record_evaluation({"eval/loss": 0.5}, "step-5") is None


@pytest.mark.parametrize(
    ("config", "position", "reason"),
    [
        ({"num_epochs": 2}, TrainState(epoch=1), None),
        ({"num_epochs": 2}, TrainState(epoch=2), "num_epochs reached"),
        ({"num_epochs": 2, "max_steps": 5}, TrainState(optimizer_step=4), None),
        ({"num_epochs": 2, "max_steps": 5}, TrainState(optimizer_step=5), "max_steps reached"),
    ],
)
def test_the_progress_of_a_run_knows_why_nothing_is_left(
    config: dict[str, Any], position: TrainState, reason: str | None
) -> None:
    progress = make(**config)
    progress.state = position
    assert progress.end_reason == reason
    progress.requested_stop = "early stopping"
    assert progress.end_reason == "early stopping"


@pytest.mark.parametrize(
    ("is_finished", "is_evaluated", "stop", "expected"),
    [
        (True, True, NOTHING, ("done", "max_steps reached")),
        (True, True, Stop(15), ("done", "max_steps reached")),
        (True, False, Stop(15), ("preempted", "SIGTERM")),
        (False, True, Stop(15), ("preempted", "SIGTERM")),
        (False, False, Stop(TIME_LIMIT), ("stopped", "time limit")),
        (False, False, NOTHING, ("stopped", "left by the program")),
    ],
)
def test_a_result_is_done_only_if_the_last_weights_are_evaluated(
    is_finished: bool, is_evaluated: bool, stop: Stop, expected: tuple[str, str]
) -> None:
    progress = make(max_steps=5 if is_finished else 9)
    evaluate(progress, 5, 0.5)
    assert progress.is_evaluated
    progress.evaluated_step = 5 if is_evaluated else 4
    result = progress.result(stop, Path())
    assert (result.state, result.stop_reason) == expected
    assert result.position.optimizer_step == 5


def test_progress_that_is_stored_is_restored_without_lists() -> None:
    progress = make()
    progress.state = TrainState().after_step(16)
    progress.record_evaluation({"eval/loss": 0.5, "eval/matrix": [[1]]}, "step-1")
    progress.requested_stop = "early stopping"
    stored = progress.state_dict()
    assert stored["metrics"] == {"eval/loss": 0.5}
    restored = make()
    restored.load_state_dict(stored)
    assert restored.state_dict() == stored
    assert (restored.best, restored.is_evaluated, restored.end_reason) == (
        progress.best,
        True,
        "early stopping",
    )


@pytest.mark.parametrize(
    ("changes", "step_in_epoch", "requested_stop"),
    [
        ([], 3, "early stopping"),
        (["trainer.patience"], 3, None),
        (["batch.global_batch_size"], 0, None),
        (["seed", "trainer.patience"], 0, None),
    ],
)
def test_progress_after_changed_settings_decides_again(
    changes: list[str], step_in_epoch: int, requested_stop: str | None
) -> None:
    progress = make()
    progress.state = TrainState(optimizer_step=13, epoch=1, step_in_epoch=3, samples_seen=99)
    progress.requested_stop = "early stopping"
    restored = make()
    restored.load_state_dict(progress.state_dict())
    restored.go_on_with(changes)
    assert restored.state == TrainState(13, 1, step_in_epoch, 99)
    assert restored.requested_stop == requested_stop


def test_the_best_of_another_metric_is_forgotten() -> None:
    progress = make()
    evaluate(progress, 1, 0.5)
    stored = progress.state_dict()
    other = Progress(TrainerConfig(), {"eval": ACCURACY})
    other.load_state_dict(stored)
    assert other.best is None
    same = make()
    same.load_state_dict(stored)
    assert same.best == progress.best


@pytest.mark.parametrize(
    ("evaluation", "config", "expected"),
    [
        (BOTH, {}, ("eval/accuracy", "max")),
        (LOSS, {}, ("eval/loss", "min")),
        (BOTH, {"ema_decay": 0.9}, ("eval_ema/accuracy", "max")),
        (LOSS, {"ema_decay": 0.9}, ("eval_ema/loss", "min")),
        (BOTH, {"ema_decay": 0.9, "monitor": "eval/loss"}, ("eval/loss", "min")),
        (BOTH, {"monitor": "eval/accuracy", "monitor_mode": "min"}, ("eval/accuracy", "min")),
        (Named(), {}, None),
    ],
)
def test_the_monitored_metric_is_the_accuracy_or_the_first_declared(
    evaluation: Named, config: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    groups = ["eval", "eval_ema"] if config.get("ema_decay") else ["eval"]
    found = choose_monitor(TrainerConfig(**config), dict.fromkeys(groups, evaluation))
    assert next(iter(found.items()), None) == expected


def test_the_monitored_metric_is_one_of_the_first_evaluation_set() -> None:
    groups = {"eval_near": LOSS, "eval_far": ACCURACY, "eval_ema_far": ACCURACY, "test": BOTH}
    assert next(iter(choose_monitor(TrainerConfig(), groups).items())) == ("eval_near/loss", "min")
    averaged = {"eval_near": LOSS, "eval_ema_near": LOSS, **groups}
    assert next(iter(choose_monitor(TrainerConfig(ema_decay=0.9), averaged).items())) == (
        "eval_ema_near/loss",
        "min",
    )
    config = TrainerConfig(monitor="eval_far/accuracy")
    assert next(iter(choose_monitor(config, groups).items())) == ("eval_far/accuracy", "max")
    assert Progress(config, groups).monitored == ("eval_far/accuracy", "max")


@pytest.mark.parametrize(
    ("evaluation", "config", "said"),
    [
        (LOSS, {"monitor": "eval/f1"}, "no metric 'eval/f1' to monitor: set --trainer.monitor"),
        (LOSS, {"monitor": "test/loss"}, "no metric 'test/loss' to monitor: set --trainer.monitor"),
        (Named(), {"patience": 2}, "no metric '' to monitor: the metrics declare none"),
    ],
)
def test_a_monitored_metric_that_there_is_not_is_refused(
    evaluation: Named, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Progress(TrainerConfig(**config), {"eval": evaluation, "test": evaluation})
