from __future__ import annotations

import pytest

from .flags_page import PAGE, TYPED, answer, page


def test_the_page_of_flags_says_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert PAGE.read_text() == page(), "run: python -m tests.docs.flags_page"


@pytest.mark.parametrize("toolkit", TYPED)
def test_fifteen_flags_of_each_toolkit_work_or_are_answered(toolkit: str) -> None:
    assert len(set(TYPED[toolkit])) == 15
    assert [typed for typed in TYPED[toolkit] if answer(typed) == "see --help"] == []
