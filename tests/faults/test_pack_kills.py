"""Some trials of `pack_kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.pack_kills import Campaign

# Newer Pythons warn of threads; those of torch are idle here.
pytestmark = [pytest.mark.crash, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


@pytest.mark.timeout(3600)
def test_a_pack_that_is_killed_at_random_moments_writes_the_same_bytes(
    tmp_path: Path, effort: int
) -> None:
    campaign = Campaign(tmp_path)
    results = [campaign.run_trial(number) for number in range(2 * effort)]
    assert [result for result in results if not result["ok"]] == []
    assert sum(result["kills"] for result in results) >= len(results) / 2
