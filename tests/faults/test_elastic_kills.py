"""Some kills of `elastic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import elastic


@pytest.mark.slow
def test_a_run_killed_on_4_2_1_and_4_processes_ends_with_the_bytes_of_one(
    tmp_path: Path, effort: int
) -> None:
    assert elastic.campaign(tmp_path / "campaign", 4 * effort)
