"""Some trials of `interruptions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import interruptions

pytestmark = pytest.mark.signal


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return interruptions.run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.timeout(3600)
def test_a_run_interrupted_at_any_moment_ends_as_if_nobody_had_touched_it(
    tmp_path: Path, effort: int, undisturbed: dict[int, dict[str, Any]]
) -> None:
    trials = [interruptions.draw_trial(number) for number in range(3 * effort)]
    results = [
        interruptions.run_trial(t, tmp_path / str(t.number), undisturbed[t.num_processes])
        for t in trials
    ]
    assert [result for result in results if not result["ok"]] == []
    assert sum(result["landed"] for result in results) > len(results) / 2
