from __future__ import annotations

from typing import Any, cast

import pytest

from accel_trainer.callbacks.early_stopping import EarlyStopping, TimeLimit
from accel_trainer.core.train_state import BestCheckpoint
from accel_trainer.core.types import StepReport
from accel_trainer.fault_tolerance.preemption import StopFlag
from accel_trainer.training.callback import TrainerView


class Run:
    """What early stopping reads of a trainer, and its one request."""

    def __init__(self) -> None:
        self.best: BestCheckpoint | None = None
        self.stop_reason: str | None = None

    def request_stop(self, reason: str) -> None:
        self.stop_reason = reason


def evaluate(stopping: EarlyStopping, best: list[str | None]) -> Run:
    run = Run()
    for name in best:
        run.best = None if name is None else BestCheckpoint(name, "eval/loss", 0.5)
        stopping.on_evaluate_end(cast(TrainerView, run), {})
    return run


@pytest.mark.parametrize(
    ("best", "stops"),
    [
        (["a", "a"], False),
        (["a", "a", "a"], True),
        (["a", "a", "b", "b"], False),
        (["a", "b", "b", "b"], True),
        ([None, None], True),
    ],
)
def test_early_stopping_counts_evaluations_since_the_best(
    best: list[str | None], stops: bool
) -> None:
    run = evaluate(EarlyStopping(patience=2), best)
    assert run.stop_reason == ("early stopping: no better evaluation in 2" if stops else None)


def test_early_stopping_goes_on_counting_after_a_resume() -> None:
    before = EarlyStopping(patience=3)
    evaluate(before, ["a", "a", "a"])
    after = EarlyStopping(patience=3)
    after.load_state_dict(before.state_dict())
    assert evaluate(after, ["a"]).stop_reason is not None


@pytest.mark.parametrize(("patience", "stops"), [(2, True), (3, False)])
def test_early_stopping_decides_again_if_a_resume_has_another_patience(
    patience: int, stops: bool
) -> None:
    state: dict[str, Any] = {"num_bad_evaluations": 2, "best_checkpoint": "a"}
    stopping, run = EarlyStopping(patience=patience), Run()
    run.best = BestCheckpoint("a", "eval/loss", 0.5)
    stopping.load_state_dict(state)
    stopping.on_fit_start(cast(TrainerView, run))
    assert (run.stop_reason is not None) == stops


@pytest.mark.parametrize(("before", "now"), [("a", None), (None, "a")])
def test_early_stopping_counts_anew_for_another_metric_or_if_it_is_new(
    before: str | None, now: str | None
) -> None:
    stopping, run = EarlyStopping(patience=2), Run()
    stopping.load_state_dict({"num_bad_evaluations": 2, "best_checkpoint": before})
    run.best = None if now is None else BestCheckpoint(now, "eval/accuracy", 0.5)
    stopping.on_fit_start(cast(TrainerView, run))
    assert run.stop_reason is None
    assert evaluate(stopping, [now]).stop_reason is None
    assert evaluate(stopping, [now]).stop_reason is not None


@pytest.mark.parametrize(("max_seconds", "reason"), [(3600.0, None), (-1.0, "time limit")])
def test_a_time_limit_stops_at_the_first_step_after_it(
    max_seconds: float, reason: str | None
) -> None:
    flag = StopFlag()
    TimeLimit(flag, max_seconds=max_seconds).on_step_end(
        cast(TrainerView, Run()), cast(StepReport, None)
    )
    flag.poll()
    assert flag.agreed.reason == reason
