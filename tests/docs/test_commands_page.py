from __future__ import annotations

import pytest

from accel_trainer.cli.main import find_commands

from .commands_page import MARK, NOT_RUN, PAGE, sections


def test_the_page_of_commands_says_what_their_help_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    written = PAGE.read_text().partition(MARK)[2]
    assert written == sections(), "run: python -m tests.docs.commands_page"


def test_only_commands_that_exist_are_left_out() -> None:
    assert set(NOT_RUN) <= set(find_commands())
