"""A failing test of the day is tried at an earlier commit, too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from . import selection
def pytest_addoption(parser):
    parser.addoption("--part")
def pytest_collection_modifyitems(config, items):
    selection.keep(config, items, lambda item: selection.is_in_part(item.nodeid, "1/1"))
"""
TESTS = """
import pytest
pytestmark = pytest.mark.slow
def test_that_holds(): ...
def test_that_failed_before():
    assert False
def test_that_fails_now():
    assert {now}
"""
ADDED = """
def test_that_is_new():
    assert False
"""


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.mark.slow
def test_what_an_earlier_commit_fails_as_well_is_said_and_is_no_failure(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\npythonpath = .\n")
    (tests / "__init__.py").touch()
    (tests / "conftest.py").write_text(CONFTEST)
    for name in ("daily.py", "selection.py"):
        shutil.copy(Path(__file__).parent / name, tests)
    git(tmp_path, "init", "-q")

    def daily(test: str) -> tuple[int, str]:
        """Commit these tests, and run them beside the first commit."""
        (tests / "test_it.py").write_text(test)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "A change", "--allow-empty")
        command = [sys.executable, "-m", "tests.daily", "--base", "first", "--jobs", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    git(tmp_path, "commit", "-qm", "Nothing", "--allow-empty")
    git(tmp_path, "tag", "first")
    code, _ = daily(TESTS.format(now=True))
    assert code == 1, "the first commit has no tests"
    git(tmp_path, "tag", "-f", "first")
    code, said = daily(TESTS.format(now=True))
    assert code == 0, said
    assert said.count(" as well: tests/test_it.py::test_that_failed_before") == 1
    code, said = daily(TESTS.format(now=False) + ADDED)
    assert code == 1
    assert "fails here: tests/test_it.py::test_that_fails_now" in said
    assert "fails here: tests/test_it.py::test_that_is_new" in said
    assert said.count("as well: ") == 1
