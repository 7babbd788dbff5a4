"""Pages and pictures under names that users choose replace only earlier ones of a command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_trainer.cli.common.own_files import GENERATOR, refuse_other_file, write_own_file
from accel_trainer.core.errors import OutputError
from tests.cli.conftest import run_command

OTHERS: dict[str, Callable[[Path], object]] = {
    "a text": lambda path: path.write_text("my thesis"),
    "an empty file": Path.touch,
    "another page": lambda path: path.write_text("<!doctype html><title>mine</title>"),
    "a page that speaks of ours": lambda path: path.write_text(f"{'x' * 9000}{GENERATOR}"),
    "a folder": Path.mkdir,
    "a link to a file": lambda path: path.symlink_to(__file__),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_command_has_written_is_not_replaced(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    OTHERS[name](path)
    before = identity(path)
    with pytest.raises(OutputError, match="FILE_EXISTS.*--to .*page.html"):
        write_own_file(path, GENERATOR.encode(), "--to")
    assert identity(path) == before


def test_the_folder_of_a_page_is_created(tmp_path: Path) -> None:
    path = tmp_path / "new" / "er" / "page.html"
    write_own_file(path, GENERATOR.encode(), "--page")
    assert path.read_bytes() == GENERATOR.encode()


def test_a_page_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="OUT_DIR.*/file"):
        refuse_other_file(tmp_path / "file" / "page.html", "--page")


def identity(path: Path) -> tuple[int, ...]:
    """Return what a change or a replacement of the file alters; not when it was last read."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_an_earlier_page_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for text in ("first", "second"):
        write_own_file(path, f"<head>{GENERATOR}{text}".encode(), "--to")
    assert path.read_text().endswith("second")


def test_an_earlier_picture_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from accel_trainer.cli.lr_find import analyze, draw

    test = analyze([1e-3, 1e-2], [2.0, 1.0])
    draw(test, tmp_path / "ours.png")
    refuse_other_file(tmp_path / "ours.png", "--png")
    Figure().savefig(tmp_path / "mine.png")
    with pytest.raises(OutputError, match="FILE_EXISTS"):
        draw(test, tmp_path / "mine.png")


def test_each_command_refuses_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run and the data that they are given do not even exist."""
    mine = tmp_path / "mine.html"
    mine.write_text("my thesis")
    gone = tmp_path / "gone"
    for words in (
        ["report", gone, "--to", mine],
        ["data", gone, "--html", mine],
        ["lr-find", "recipes/minimal.py", "--png", mine],
    ):
        code, out, err = run_command(capsys, words)
        assert (code, out, "error[FILE_EXISTS]" in err) == (73, "", True), (words, err)
    assert mine.read_text() == "my thesis"


def test_a_report_replaces_no_picture_beside_it(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    charts = tmp_path / "report"
    charts.mkdir()
    (charts / "loss.png").write_text("mine")
    words = ["report", runs / "fast", "--to", tmp_path / "report.html"]
    assert run_command(capsys, words)[0] == 73
    assert (charts / "loss.png").read_text() == "mine"
    assert not (tmp_path / "report.html").exists()
    (charts / "loss.png").unlink()
    assert [run_command(capsys, words)[0] for _ in range(2)] == [0, 0]
