"""Some trials of `photo_damage`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.photo_damage import DAMAGES, LAYOUTS, Campaign, is_ok

# Newer Pythons warn of threads; those of torch are idle here.
pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


@pytest.mark.timeout(3600)
def test_a_damaged_or_swapped_photo_is_named_or_cannot_be_seen(tmp_path: Path, effort: int) -> None:
    """Fault (Data, config and users' code): a table, packed or not, or a description of one is cut
    short, emptied or unreadable -> exit 65 with the name of the file before the first step. A
    description that can be read and is wrong, or is missing, is an error of one line with the
    name of the folder. Packing again restores the same bytes, even if `SHA256SUMS` is damaged;
    if `pack.json` is damaged, it asks for a different folder
    """
    campaign = Campaign(tmp_path)
    # Every third of the pairs has every layout and every damage.
    numbers = range(0, len(LAYOUTS) * len(DAMAGES) * max(1, effort // 5), 3 if effort == 1 else 1)
    results = [campaign.run_trial(number) for number in numbers]
    assert [result for result in results if not is_ok(result)] == []
