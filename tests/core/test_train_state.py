from __future__ import annotations

import pytest

from accel_trainer.core.train_state import TrainState, checkpoint_name


def test_a_position_advances_by_a_step_and_by_an_epoch() -> None:
    position = TrainState().after_step(16).after_step(9)
    assert position == TrainState(optimizer_step=2, epoch=0, step_in_epoch=2, samples_seen=25)
    assert position.after_epoch() == TrainState(
        optimizer_step=2, epoch=1, step_in_epoch=0, samples_seen=25
    )


def test_no_callback_moves_a_run() -> None:
    with pytest.raises(AttributeError):
        TrainState().epoch = 7  # type: ignore[misc]


def test_a_stored_position_is_restored_and_none_of_it_may_be_missing() -> None:
    position = TrainState(optimizer_step=7, epoch=2, step_in_epoch=1, samples_seen=99)
    assert TrainState.from_dict({**position._asdict(), "more": 1}) == position
    with pytest.raises(KeyError, match="samples_seen"):
        TrainState.from_dict({"optimizer_step": 7, "epoch": 2, "step_in_epoch": 1})


def test_the_names_of_checkpoints_sort_as_their_positions_do() -> None:
    positions = [TrainState(9, 1), TrainState(10, 0), TrainState(10, 1), TrainState(100_000, 0)]
    names = [checkpoint_name(position) for position in positions]
    assert names == sorted(names)
    assert names[2] == "step-0000000010-epoch-00001"
