"""`docs/faults.md` names, for every fault, a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()


def test_each_test_that_the_page_names_exists() -> None:
    named = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
    assert len(named) > 100
    assert [
        f"{path}::{name}"
        for path, name in named
        if not (TESTS / path).exists() or f"\ndef {name}(" not in (TESTS / path).read_text()
    ] == []


def test_no_row_is_left_out() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert rows == list(range(1, 98))
