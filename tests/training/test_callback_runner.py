from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.core.errors import ConfigError, PartFailed
from accel_trainer.training.callback import Callback, TrainerView
from accel_trainer.training.callback_runner import CallbackRunner

TRAINER = cast(TrainerView, object())


class Counter(Callback):
    """Counts its steps, and keeps what it saw."""

    def __init__(self, seen: list[tuple[Any, ...]] | None = None) -> None:
        self.num_steps = 0
        self.seen = [] if seen is None else seen

    def on_step_end(self, trainer: TrainerView, report: Any) -> None:
        self.num_steps += 1
        self.seen.append((self, trainer, report))

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        self.seen.append((self, trainer, error))

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps} if self.num_steps else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Other(Counter):
    """Another class of the same kind."""


class Failing(Callback):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_step_end(self, trainer: TrainerView, report: Any) -> None:
        raise self.error

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        raise self.error


class Saves:
    """A save in flight, which may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.fails:
            raise OSError("the disk is full")


def test_callbacks_are_notified_in_their_order_with_the_trainer() -> None:
    seen: list[tuple[Any, ...]] = []
    first, second = Counter(seen), Counter(seen)
    CallbackRunner([first, second]).notify("on_step_end", TRAINER, ["report"])
    assert seen == [(first, TRAINER, "report"), (second, TRAINER, "report")]


def test_the_states_of_callbacks_are_kept_apart_by_class_and_number() -> None:
    callbacks = [Counter(), Other(), Counter(), Counter()]
    for number, callback in enumerate(callbacks):
        callback.num_steps = number
    states = CallbackRunner(callbacks).state_dict()
    assert states == {
        "Other": {"num_steps": 1},
        "Counter-2": {"num_steps": 2},
        "Counter-3": {"num_steps": 3},
    }
    restored = [Counter(), Other(), Counter(), Counter()]
    restored[0].num_steps = 9
    CallbackRunner(restored).load_state_dict(states)
    assert [callback.num_steps for callback in restored] == [9, 1, 2, 3], (
        "one without a state keeps its own"
    )


def test_the_state_of_a_callback_that_is_gone_is_named(caplog: pytest.LogCaptureFixture) -> None:
    states = {"Counter": {"num_steps": 4}, "Renamed": {"mean": 1.0}}
    runner = CallbackRunner([Counter()])
    runner.load_state_dict(states)
    assert caplog.records == [], "each process loads, and one of them warns"
    runner.warn_of_lost(states)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the checkpoint has state of the callback Renamed, which this run does not have: it is lost"
    )


def test_an_error_of_a_callback_names_its_class_and_hook() -> None:
    last = Counter()
    runner = CallbackRunner([Failing(ValueError("mine")), last])
    with pytest.raises(PartFailed, match="callback Failing.on_step_end failed") as caught:
        runner.notify("on_step_end", TRAINER, [None])
    assert isinstance(caught.value.__cause__, ValueError)
    assert last.num_steps == 0


def test_a_user_error_of_a_callback_is_raised_as_it_is() -> None:
    error = ConfigError("CONFIG", "set it")
    with pytest.raises(ConfigError) as caught:
        CallbackRunner([Failing(error)]).notify("on_step_end", TRAINER, [None])
    assert caught.value is error


@pytest.mark.parametrize("fails", [False, True])
def test_every_callback_is_told_of_an_error_which_is_raised_again(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    counter = Counter()
    saves = Saves(fails=fails)
    error = KeyError("first")

    def work() -> None:
        runner = CallbackRunner([Failing(ValueError("second")), counter])
        with runner.errors_observed(TRAINER, cast(Checkpointer, saves)):
            raise error

    with caplog.at_level(logging.ERROR), pytest.raises(KeyError) as caught:
        work()
    assert caught.value is error
    assert counter.seen == [(counter, TRAINER, error)]
    assert saves.num_waits == 1
    assert "Failing.on_error failed" in caplog.text
