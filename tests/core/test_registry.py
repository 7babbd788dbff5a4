from __future__ import annotations

from typing import Any

import pytest

from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.registry import Registry, Stateful


class Number(Stateful):
    """A number that must not be negative."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value} if self.value else {}

    def validated(self, stored: dict[str, int]) -> int:
        if stored["value"] < 0:
            raise CheckpointError("CKPT_STATE", "negative")
        return stored["value"]

    def load_state_dict(self, state: int) -> None:
        self.value = state


class Fresh(Number):
    """A number that may begin at a checkpoint without it."""

    starts_fresh = True

    def start_fresh(self) -> None:
        self.value = 100


class Optional(Number):
    """A number that a checkpoint may lack."""

    is_optional = True


def values_of(parts: dict[str, Any]) -> list[int]:
    return [part.value for part in parts.values()]


def test_a_registry_restores_what_it_stored_and_leaves_out_empty_states() -> None:
    parts = {"a": Number(1), "b": Number(2), "empty": Optional(0)}
    stored = Registry(parts).state_dict()
    assert stored == {"a": {"value": 1}, "b": {"value": 2}}
    others = {"a": Number(7), "b": Number(8), "empty": Optional(9)}
    Registry(others).load_state_dict(stored)
    assert values_of(others) == [1, 2, 9]


def test_a_registry_changes_no_part_unless_all_fit() -> None:
    parts = {"a": Number(1), "b": Number(2)}
    with pytest.raises(CheckpointError, match="negative"):
        Registry(parts).load_state_dict({"a": {"value": 5}, "b": {"value": -1}})
    assert values_of(parts) == [1, 2]


@pytest.mark.parametrize(("changes", "is_refused"), [((), True), (("trainer.ema_decay",), False)])
def test_a_part_of_a_registry_starts_fresh_only_if_settings_were_changed(
    changes: tuple[str, ...], is_refused: bool
) -> None:
    parts = {"a": Number(1), "fresh": Fresh(2)}
    registry = Registry(parts)
    if is_refused:
        with pytest.raises(CheckpointError, match="the checkpoint has no fresh"):
            registry.load_state_dict({"a": {"value": 5}}, changes=changes)
        assert values_of(parts) == [1, 2]
    else:
        registry.load_state_dict({"a": {"value": 5}}, changes=changes)
        assert values_of(parts) == [5, 100]


def test_a_part_that_must_be_there_is_missed_whatever_was_changed() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint has no a"):
        Registry({"a": Number(1)}).load_state_dict({}, changes=("seed",))
