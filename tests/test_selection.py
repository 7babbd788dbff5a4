from pathlib import Path
from typing import Any

import pytest

from . import selection

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
