from __future__ import annotations

import pytest

from .flags_table import MARK, PAGE, TYPED, answer, table


def test_the_table_of_flags_says_what_happens() -> None:
    written = PAGE.read_text().partition(MARK)[2]
    assert written == table(), "run: python -m tests.docs.flags_table"


@pytest.mark.parametrize("toolkit", TYPED)
def test_fifteen_flags_of_each_toolkit_work_or_are_answered(toolkit: str) -> None:
    assert len(set(TYPED[toolkit])) == 15
    assert [typed for typed in TYPED[toolkit] if answer(typed) == "see --help"] == []
