"""How a comparison is told."""

from __future__ import annotations

import pytest

from accel_trainer.lab.compare.text import drawn


@pytest.mark.parametrize(
    ("interval", "order"),
    [((0.1, 1.2), "0[*]"), ((-0.5, 0.7), "[0*]"), ((-0.5, -0.1), "[*]0"), ((-0.2, 0.1), "[*0]")],
)
def test_the_interval_is_drawn_beside_zero(interval: tuple[float, float], order: str) -> None:
    line = drawn(interval, sum(interval) / 2)
    assert "".join(letter for letter in line if letter in "[]0*") == order
    assert len(line) <= 80


def test_lengths_in_a_drawing_are_to_scale() -> None:
    line = drawn((1.0, 3.0), 2.0)
    zero, first, mean, last = (line.index(mark) for mark in "0[*]")
    assert first - zero == pytest.approx(mean - first, abs=1) == pytest.approx(last - mean, abs=1)
