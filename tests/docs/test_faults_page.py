"""`docs/faults.md` names, for every fault, a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", PAGE))))
def test_a_test_that_the_page_names_exists(named: str) -> None:
    path, name = named.split("::")
    assert f"\ndef {name}(" in (TESTS / path).read_text()


def test_no_row_is_left_out() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert rows == list(range(1, 98))
