"""Some kills of `changing_kills`; many more in `make crash-test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import changing_kills

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@pytest.mark.parametrize("cases", changing_kills.CASES)
def test_runs_with_users_parts_end_with_the_same_bytes_after_kills(
    tmp_path: Path, cases: str, effort: int
) -> None:
    problems, kills = changing_kills.campaign(
        tmp_path, max(3, 30 * effort // 100), changing_kills.CASES[cases]
    )
    assert kills.total() >= 3
    assert problems == []
