"""Some kills of `changing_kills`; sixty in `make crash-test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import changing_kills

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def test_runs_whose_forward_changes_buffers_end_with_the_same_bytes_after_kills(tmp_path: Path, effort: int) -> None:
    problems, kills = changing_kills.campaign(tmp_path, max(3, 60 * effort // 100))
    assert kills.total() >= 3
    assert problems == []
