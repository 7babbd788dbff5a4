from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import promises
from .mutants import MUTANTS, ROOT, copy_repository
from .promises import PROMISES, Promise, break_promise, find, try_promise
from .whole_runs import IN_MAKE_TEST


def test_each_promise_is_kept_by_one_function_and_has_tests() -> None:
    assert len(PROMISES) >= 60
    for promise in PROMISES:
        find(promise.function, ROOT)
        for test in promise.tests.split():
            assert (ROOT / test.partition("::")[0]).exists(), test
            named = IN_MAKE_TEST.get(test.partition("::")[0].removeprefix("tests/"), (test,))
            assert named, f"make test runs nothing of {test}"


def test_each_mutant_fits_the_code_once_and_has_tests() -> None:
    for path, mutants in MUTANTS.items():
        source = (ROOT / "accel_trainer" / path).read_text()
        for mutant in mutants:
            assert source.count(mutant.old) == 1, mutant.name
            for test in mutant.tests.split():
                file, _, name = test.partition("::")
                tests = (ROOT / "tests" / file).read_text() if name else "def ("
                assert f"def {name.partition('[')[0]}(" in tests, test


def test_the_page_of_promises_is_that_of_the_table() -> None:
    assert (ROOT / "docs/reference/promises.md").read_text() == promises.page(), (
        "update it: python -m tests.promises --page"
    )


def test_a_broken_function_is_still_python_and_a_missing_one_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "accel_trainer", tmp_path / "accel_trainer")
    for promise in PROMISES:
        break_promise(promise, tmp_path)
    for path in (tmp_path / "accel_trainer").rglob("*.py"):
        compile(path.read_text(), path, "exec")
    with pytest.raises(LookupError, match="gone_function"):
        find("gone_function", ROOT)


@pytest.mark.slow
def test_a_promise_that_nothing_checks_is_green(tmp_path: Path) -> None:
    copy_repository(tmp_path)
    unchecked = Promise("the alphabet", "counted", "return noun", "tests/core/test_rng.py")
    assert try_promise(unchecked, tmp_path) == "GREEN"
