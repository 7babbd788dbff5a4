from __future__ import annotations

import pytest

from accel_trainer.fault_tolerance.activity import Activity


def test_an_activity_adds_up_the_seconds_of_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr(
        "accel_trainer.fault_tolerance.activity.time.monotonic", lambda: next(clock)
    )
    activity = Activity()
    activity.phase = "training"
    with activity.during("save"):
        assert activity.phase == "save"
    assert activity.phase == "training"
    activity.phase = "done"
    assert activity.phase_s == {"start": 2.0, "training": 3.0 + 4.0, "save": 1.0}


def test_an_activity_stays_in_the_phase_of_an_error() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.during("evaluation"):
        raise KeyError
    assert activity.phase == "evaluation"
