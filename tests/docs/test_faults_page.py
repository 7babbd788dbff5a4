from __future__ import annotations

from .faults_page import PAGE, page


def test_the_page_of_faults_says_what_the_tests_say() -> None:
    written = PAGE.read_text()
    assert written == page(), "run: python -m tests.docs.faults_page"
    assert written.count("::test_") > 110
