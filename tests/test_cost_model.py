"""The prediction of many processes, against what is known of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cost_model import CostModel

MODEL = CostModel(
    compute_s=0.1, data_s=0.01, gradient_bytes=100e6, bytes_per_s=10e9, latency_s=1e-5, overlap=0.5
)


def test_one_process_sends_nothing() -> None:
    assert MODEL.all_reduce_s(1) == 0
    assert MODEL.step_s(1) == pytest.approx(0.11)
    assert MODEL.efficiency(1) == 1


def test_the_cost_model_of_a_ring_is_twice_the_gradients_at_most() -> None:
    assert MODEL.all_reduce_s(2) == pytest.approx(0.01 + 2e-5)
    assert MODEL.all_reduce_s(1024) == pytest.approx(0.02 * 1023 / 1024 + 2046e-5)


def test_what_is_hidden_costs_nothing_and_shared_cores_compute_in_turn() -> None:
    assert replace(MODEL, overlap=1.0).efficiency(1024) == 1
    assert MODEL.step_s(4, processes_per_core=2) - MODEL.step_s(4) == pytest.approx(0.11)
    assert MODEL.step_s(4, processes_per_core=0.5) == MODEL.step_s(4)
    efficiencies = [MODEL.efficiency(number) for number in (1, 2, 8, 64, 1024)]
    assert efficiencies == sorted(efficiencies, reverse=True)
