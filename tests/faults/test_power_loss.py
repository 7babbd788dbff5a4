"""The checkpoint protocol survives every simulated power loss, and the simulation can tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_trainer.checkpoint import loading
from tests.faults.power_loss import MUTANTS, simulate

pytestmark = pytest.mark.crash


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loading, "RETRY_DELAYS_S", ())
    return


def test_no_power_loss_takes_an_acknowledged_checkpoint(effort: int) -> None:
    """Fault (Crash during a save): power loss: data that was not synced is lost, in any order ->
    the newest committed checkpoint loads; the final weights are identical to those of an
    uninterrupted run
    """
    states = list(simulate(num_states=200 * effort))
    assert len(states) >= 200 * effort
    assert not any(states)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_save_protocol_with_a_step_left_out_loses_checkpoints(mutant: str) -> None:
    assert any(simulate(num_states=1, **MUTANTS[mutant]))
