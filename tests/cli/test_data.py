from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.vision.make_photos import encoded, photo, write_classes

from .conftest import run_command

pytestmark = pytest.mark.usefixtures("quiet_datasets")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    write_classes(root / "train", ["ant", "bee"], per_class=4)
    write_classes(root / "val", ["ant", "bee"], per_class=1)
    for path in (root / "val").rglob("*.jpg"):
        path.write_bytes(encoded(photo(64, 48, seed=99 + len(path.parts[-2]) + ord(path.parts[-2][0]))))
    (root / "train" / "bee" / "grey.png").write_bytes(encoded(photo(20, 90).convert("L"), "png"))
    return root


def data(
    capsys: pytest.CaptureFixture[str], source: Path, *flags: object, cache: Path | None = None
) -> tuple[int, str, str]:
    return run_command(capsys, ["data", source, "--cache-dir", cache or source.parent / "cache", *flags])


def test_a_whole_data_set_is_described(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = data(capsys, photos)
    assert (code, err) == (0, "")
    assert f"{photos}: 11 photos of 2 classes" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["class", "train", "validation"] in lines
    assert ["bee", "5", "1"] in lines
    assert ["ant", "4", "1"] in lines
    assert ["(all)", "9", "2"] in lines
    assert "shorter side: 20 to 48 pixels, median 30" in out
    assert "formats: 10 JPEG RGB, 1 PNG L" in out
    assert "duplicates: none" in out


def test_copies_are_found_by_content_first_those_that_leak_into_the_evaluation(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(photos / "train" / "ant" / "0.jpg", photos / "train" / "ant" / "again.jpg")
    shutil.copy(photos / "train" / "bee" / "1.jpg", photos / "val" / "bee" / "leak.jpg")
    _, out, _ = data(capsys, photos)
    assert "duplicates: 2 photos have the bytes of another, 1 of them in another split" in out
    listed = [line for line in out.splitlines() if " = " in line]
    assert ["leak.jpg" in line for line in listed] == [True, False]


def test_broken_photos_are_named_and_the_exit_code_says_that_a_run_would_stop(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = photos / "train" / "bee" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    code, out, _ = data(capsys, photos)
    assert code == 65
    assert "1 broken:" in out
    assert "bee/2.jpg" in out
    assert "formats: 9 JPEG RGB, 1 PNG L" in out


def test_what_a_run_would_refuse_is_said_with_its_exit_code(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(photos / "val")
    code, out, _ = data(capsys, photos)
    assert code == 65
    assert "a run would stop: error[DATA_NO_VAL]" in out
    assert "--val-fraction 0.1" in out
    code, out, _ = data(capsys, photos, "--val-fraction", "0.5")
    assert code == 0
    assert "would stop" not in out


def test_a_folder_that_is_not_a_data_set_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("Once")
    code, out, err = data(capsys, tmp_path / "thesis")
    assert (code, out, len(err.splitlines())) == (65, "", 1)


def test_of_many_classes_the_largest_and_the_smallest_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "photos"
    write_classes(root, [f"{number:02}" for number in range(25)], per_class=1)
    (root / "07" / "more.jpg").write_bytes(encoded(photo(33, 33)))
    _, out, _ = data(capsys, root, "--val-fraction", "0.3")
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert len(rows) == 1 + 10 + 1 + 10 + 1
    assert rows[1] == ["07", "2"]
    assert rows[11][:3] == ["(5", "more", "classes)"]
