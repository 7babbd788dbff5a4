from pathlib import Path
from typing import Any

import pytest

from . import selection, whole_runs

NAMES = [f"tests/test_a.py::test_it[{number}]" for number in range(300)]


def test_each_test_is_in_one_part_whatever_its_group() -> None:
    for name in NAMES:
        parts = [selection.is_in_part(name, f"{part}/3") for part in (1, 2, 3)]
        assert sum(parts) == 1
        assert parts == [selection.is_in_part(f"{name}@runs", f"{part}/3") for part in (1, 2, 3)]
    sizes = [sum(selection.is_in_part(name, f"{part}/3") for name in NAMES) for part in (1, 2, 3)]
    assert min(sizes) > len(NAMES) / 3 * 0.7


def test_three_days_in_a_row_run_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for first_day in (0, 20_783, 20_784):
        days = [86400 * day + 7 for day in range(first_day, first_day + 3)]
        parts = set()
        for now in days:
            monkeypatch.setattr(selection.time, "time", lambda now=now: now)
            parts.add(selection.part_of_today())
        assert parts == {"1/3", "2/3", "3/3"}


SHARED = """
import pytest
@pytest.fixture(scope="session")
def trained(): ...
@pytest.fixture(scope="module")
def copied(): ...
@pytest.fixture
def changed(trained): ...
def test_with_a_session(trained): ...
def test_with_a_session_by_way_of_another(changed, tmp_path): ...
def test_with_a_module(copied): ...
def test_with_both(copied, changed): ...
def test_alone(tmp_path, tmp_path_factory): ...
"""


def test_tests_that_share_a_fixture_run_in_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "test_shared.py").write_text(SHARED)

    class Groups:
        found: dict[str, Any] = {}

        def pytest_itemcollected(self, item: Any) -> None:
            self.found[item.name.removeprefix("test_")] = selection.group_of(item)

    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code = pytest.main(
        ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(folder)],
        plugins=[Groups()],
    )
    assert code == 0, capfd.readouterr()
    assert Groups.found == {
        "with_a_session": "trained",
        "with_a_session_by_way_of_another": "trained",
        "with_a_module": "below/test_shared.py",
        "with_both": "trained",
        "alone": None,
    }


WHOLE = """
import pytest
def test_named(): ...
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_with_its_first_case(case): ...
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_with_all_cases(case): ...
@pytest.mark.parametrize("case", [0, 1])
def test_with_one_case(case): ...
def test_that_nobody_named(): ...
"""
NAMED = [
    "test_named",
    "test_with_its_first_case",
    "test_with_all_cases[*]",
    "test_with_one_case[1]",
]


def test_a_file_of_whole_runs_has_its_named_tests_in_make_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("test_whole.py", "test_units.py"):
        (tmp_path / name).write_text(WHOLE)
    fast: list[str] = []

    class Marks:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            selection.mark_whole_runs(items, {"test_whole.py": NAMED})
            fast.extend(item.nodeid for item in items if not item.get_closest_marker("slow"))

    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    assert pytest.main([*words, str(tmp_path)], plugins=[Marks()]) == 0, capfd.readouterr()
    assert [name for name in fast if "whole" in name] == [
        "test_whole.py::test_named",
        "test_whole.py::test_with_its_first_case[1]",
        "test_whole.py::test_with_all_cases[1]",
        "test_whole.py::test_with_all_cases[2]",
        "test_whole.py::test_with_one_case[1]",
    ]
    assert sum("units" in name for name in fast) == 8


def test_each_test_that_make_test_has_of_whole_runs_exists() -> None:
    folder = Path(__file__).parent
    assert [
        f"{path}::{name}"
        for path, names in whole_runs.IN_MAKE_TEST.items()
        for name in names
        if f"\ndef {name.partition('[')[0]}(" not in (folder / path).read_text()
    ] == []
    assert all((folder / path).exists() for path in whole_runs.IN_MAKE_TEST)
