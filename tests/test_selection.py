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


def test_nine_days_in_a_row_run_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for first_day in (0, 20_783, 20_784):
        days = [86400 * day + 7 for day in range(first_day, first_day + 9)]
        parts = set()
        for now in days:
            monkeypatch.setattr(selection.time, "time", lambda now=now: now)
            parts.add(selection.part_of_today())
        assert parts == {f"{part}/9" for part in range(1, 10)}


SHARED = """
import pytest
@pytest.fixture(scope="session")
def trained(): ...
@pytest.fixture(scope="module")
def copied(): ...
@pytest.fixture(scope="module")
def exported(): ...
@pytest.fixture
def changed(trained): ...
def test_with_a_session(trained): ...
def test_with_a_session_by_way_of_another(changed, tmp_path): ...
def test_with_a_module(copied): ...
def test_with_both(copied, changed): ...
def test_with_another_module(exported): ...
def test_alone(tmp_path, tmp_path_factory): ...
"""
WORDS = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]


def test_tests_that_share_a_fixture_run_in_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(SHARED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    groups: dict[str, str | None] = {}

    class Groups:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            selection.mark_groups(items)
            for item in items:
                marker = item.get_closest_marker("xdist_group")
                groups[item.name.removeprefix("test_")] = marker and marker.args[0]

    words = [*WORDS, "--rootdir", str(tmp_path), str(tmp_path)]
    assert pytest.main(words, plugins=[Groups()]) == 0, capfd.readouterr()
    assert groups == {
        "with_a_session": "test_it.copied",
        "with_a_session_by_way_of_another": "test_it.copied",
        "with_a_module": "test_it.copied",
        "with_both": "test_it.copied",
        "with_another_module": "test_it.exported",
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
LEFT_OUT = ["test_named", "test_with_its_first_case[1:]"]
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
            selection.mark_slow(items, {"test_whole.py": NAMED}, {"test_units.py": LEFT_OUT})
            fast.extend(item.nodeid for item in items if not item.get_closest_marker("slow"))

    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    words = [*WORDS, "--rootdir", str(tmp_path), str(tmp_path)]
    assert pytest.main(words, plugins=[Marks()]) == 0, capfd.readouterr()
    assert fast == [
        "test_units.py::test_with_its_first_case[1]",
        "test_units.py::test_with_all_cases[1]",
        "test_units.py::test_with_all_cases[2]",
        "test_units.py::test_with_one_case[0]",
        "test_units.py::test_with_one_case[1]",
        "test_units.py::test_that_nobody_named",
        "test_whole.py::test_named",
        "test_whole.py::test_with_its_first_case[1]",
        "test_whole.py::test_with_all_cases[1]",
        "test_whole.py::test_with_all_cases[2]",
        "test_whole.py::test_with_one_case[1]",
    ]


def test_each_test_of_the_lists_exists() -> None:
    folder = Path(__file__).parent
    assert [
        f"{path}::{name}"
        for tests in (whole_runs.IN_MAKE_TEST, whole_runs.NOT_IN_MAKE_TEST)
        for path, names in tests.items()
        for name in names
        if f"\ndef {name.partition('[')[0]}(" not in (folder / path).read_text()
    ] == []
    assert all((folder / path).exists() for path in whole_runs.IN_MAKE_TEST)


@pytest.fixture(scope="module")
def shared() -> None: ...


@pytest.mark.usefixtures("shared")
def test_processes_of_tests_are_told_the_groups(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("all tests run in one process")
    assert request.node.nodeid.endswith("@test_selection.shared")
